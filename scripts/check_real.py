"""The promise on the default model: 892 tokens, every chunk size, equal to the bit. Prints a table; status 1 if one differs.

    bash scripts/check_real.sh            all of it, about half an hour on 2 cores
    bash scripts/check_real.sh --quick    chunks 73, 256 and 892, no compiled part, no weight schemes
"""

import argparse
import platform
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch

# A script's own folder is on the path, not the repository's root, where the modules stand.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from attention import KV_CACHES
from checkpoint import open_checkpoint
from generate import Sampling, Steps, compile_steps, generate
from measure import commit, device_name
from model import Transformer
from quantize import load_model
from tokenizer import load_tokenizer

CHECKPOINT = Path(__file__).resolve().parent.parent / "checkpoints/SmolLM2-135M-Instruct"
CPU, SCHEMES = torch.device("cpu"), ("int8wo", "int4wo-32")
CHUNKS = (64, 73, 128, 256, 300, 892, 1024)
T, NEW = 892, 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def stored(model: Transformer) -> list[torch.Tensor]:
    return [t[:, :, :, :T] for layer in model.layers for t in layer.attention.kv_cache.stored]


def spoil(model: Transformer) -> None:
    """NaN, or a large integer, into every slot: nothing may depend on what was there."""
    for t in [t for layer in model.layers for t in layer.attention.kv_cache.stored]:
        t.fill_(float("nan") if t.is_floating_point() else 101)


def outcome(model: Transformer, prompt: torch.Tensor, chunk: int, steps: Steps, text: bool) -> dict:
    """Last logits, what is stored, and (if asked for) the greedy and the sampled text."""
    spoil(model)
    result = {"logits": steps.prefill(model, prompt, chunk), "stored": [t.clone() for t in stored(model)]}
    for name, sampling in (("greedy", Sampling(0)), ("sampled", Sampling())) if text else ():
        torch.manual_seed(7)
        spoil(model)
        tokens = generate(model, prompt, NEW, sampling, chunk, steps)
        result[name] = torch.cat(list(tokens), 1)
    return result


def compare(got: dict, want: dict) -> str:
    """"equal", or what differs and by how much."""
    differs = [k for k in ("logits", "greedy", "sampled") if k in got and not torch.equal(got[k], want[k])]
    if not all(torch.equal(a, b) for a, b in zip(got["stored"], want["stored"])):
        differs.append("stored")
    if not differs:
        return "equal"
    return f"{', '.join(differs)} differ (logits by {(got['logits'] - want['logits']).abs().max():.2g})"


def check(label: str, model, prompt, chunks, steps: Steps, text_chunks=(), want: dict | None = None) -> tuple[int, dict]:
    """One block of the table. Returns how many differ, and the one shot's outcome."""
    want = want or outcome(model, prompt, T, steps, text=True)
    failed = 0
    for chunk in chunks:
        begin = time.perf_counter()
        verdict = compare(outcome(model, prompt, chunk, steps, chunk in text_chunks), want)
        failed += verdict != "equal"
        print(f"{label:46} chunk {chunk:5}  {verdict:8}  {time.perf_counter() - begin:7.1f} s", flush=True)
    return failed, want


def main(args: argparse.Namespace) -> int:
    print(f"torch {torch.__version__}, {device_name(CPU)}, {torch.get_num_threads()} threads, "
          f"commit {commit()}, python {platform.python_version()}")  # fmt: skip
    text = "\n\n".join(topics[key] for key in sorted(topics))
    prompt = torch.tensor([load_tokenizer(CHECKPOINT).encode(text)[:T]])
    chunks, failed = ((73, 256, 892) if args.quick else CHUNKS), 0
    for name, dtype in DTYPES.items():
        model, _ = load_model(open_checkpoint(CHECKPOINT), CPU, dtype, None)
        for kind in KV_CACHES:
            want = None  # of both masks: the square one gives the same bits
            for linear in (True, False):
                model.setup_caches(1, T + NEW, kind, linear)
                label = f"eager, {kind}, {'linear' if linear else 'square'} mask, {name}"
                more = (17, 1) if kind != "plain" and linear and not args.quick else ()
                n, want = check(label, model, prompt, (*chunks, *more), Steps(), (73,), want)
                failed += n
        if not args.quick:
            for scheme in SCHEMES:
                quantized, _ = load_model(open_checkpoint(CHECKPOINT), CPU, dtype, scheme)
                for kind in KV_CACHES:
                    quantized.setup_caches(1, T + NEW, kind)
                    label = f"eager, {scheme}, {kind}, linear mask, {name}"
                    failed += check(label, quantized, prompt, (73, 256, 300), Steps(), (73,))[0]
            steps = compile_steps(CPU, decode=True, tiles=True)
            model.setup_caches(1, T + NEW, "int8")
            n, compiled = check(f"compiled, int8, linear mask, {name}", model, prompt, (64, 73, 300), steps, (73,))
            model.setup_caches(1, T + NEW, "int8")
            eager = outcome(model, prompt, T, Steps(), text=True)
            off = (compiled["logits"] - eager["logits"]).abs().max()
            print(f"{name}: compiled against eager, not promised to the bit: logits off by {off:.2g}")
            failed += n
            torch.compiler.reset()
    print(f"{failed} differ" if failed else "all equal")
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    torch.set_grad_enabled(False)
    sys.exit(main(parser.parse_args()))
