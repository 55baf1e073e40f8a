"""What the fixed tiles cost: prefill of 892 tokens against the same steps on all rows at once, and the first token after 6.

    python scripts/bench_prefill.py [--runs 7]

Both are timed in turn in one process, so that a machine that slows down slows both; the median ratio is the figure to quote.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

# A script's own folder is on the path, not the repository's root, where the modules stand.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from attention import KV_CACHES, PREFILL_ROWS
from checkpoint import load_model
from generate import Sampling, Steps, generate, prefill
from measure import commit, device_name
from model import Call, Transformer

CHECKPOINT = Path(__file__).resolve().parent.parent / "checkpoints/SmolLM2-135M-Instruct"


def untiled(model: Transformer, prompt: torch.Tensor) -> torch.Tensor:
    """The one shot as it would be without tiles: linear layers, norms and SiLU on all rows at once. (Attention still takes
    256 rows a call, with nothing padded: its scores for all rows at once would not fit the scratch.)"""
    T, shared = prompt.shape[1], model.shared
    x = model.tok_embeddings.weight[prompt]
    starts = range(0, T, PREFILL_ROWS)
    call = Call(shared, False, [torch.tensor([s, 0, min(PREFILL_ROWS, T - s)]) for s in starts], [])
    for layer in model.layers:
        attention = layer.attention
        (qkv,) = attention.wqkv(layer.attention_norm([x]), call)
        parts = [
            torch.ops.llama.attend(part.contiguous(), shared.freqs_cis, shared.constants, attention.kv_cache.stored,
                                   shared.scratch, pos, None, shared.kind, False)
            for part, pos in zip(qkv.split(PREFILL_ROWS, 1), call.positions)
        ]  # fmt: skip
        x = x + attention.wo([torch.cat(parts, 1)], call)[0]
        x = x + layer.feed_forward(layer.ffn_norm([x]), call)[0]
    return model.logits(x[:, -1:]).squeeze(1)


def seconds(work) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main(args: argparse.Namespace) -> None:
    cpu = device_name(torch.device("cpu"))
    print(f"torch {torch.__version__}, {cpu}, {torch.get_num_threads()} threads, commit {commit()}")
    prompt = torch.randint(17, 49152, (1, 892), generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(CHECKPOINT, torch.device("cpu"), dtype)
        for kind in KV_CACHES:
            model.setup_caches(1, 900, kind)
            works = (lambda: prefill(model, prompt, 892), lambda: untiled(model, prompt))  # noqa: B023
            logits = [work() for work in works]  # a warm-up too
            off = (logits[0] - logits[1]).abs().max()
            pairs = [[seconds(work) for work in works] for _ in range(args.runs)]
            tiled, plain = (statistics.median(times) for times in zip(*pairs))
            ratio = statistics.median(a / b for a, b in pairs)
            first = lambda: next(generate(model, prompt[:, :6], 1, Sampling(0), 512, Steps()))  # noqa: B023, E731
            first()
            ttft = statistics.median(seconds(first) for _ in range(args.runs))
            print(
                f"{str(dtype)[6:]:9} {kind:6} 892 tokens: tiled {tiled * 1e3:6.0f} ms, untiled {plain * 1e3:6.0f} ms, "
                f"ratio {ratio:.3f} (median of {args.runs} pairs; logits differ by {off:.2g}); "
                f"6 tokens: first after {ttft * 1e3:.0f} ms",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7, help="pairs (default: %(default)s)")
    main(parser.parse_args())
