"""What the weight schemes cost in quality on the default model: greedy text and perplexity, prefill through the cache.

    python scripts/check_weights.py [--windows 8] [--schemes int4wo-32 int8wo]

Perplexity: windows of 1024 tokens of Python's own documentation (pydoc_data.topics), each from an empty plain cache, in
float32; the standard error is that of the paired difference between windows. Text: 64 greedy tokens after seven prompts, in
float32, int4wo-32 with the head in float against the unquantized model (its file holds 4-bit groups of 32, so nothing may
change). Status 1 if a text differs or int4wo-32 with its int8 head loses more than 0.1 % of perplexity.
"""

import argparse
import math
import statistics
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F

# A script's own folder is on the path, not the repository's root, where the modules stand.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from checkpoint import open_checkpoint
from cli import Parser, whole
from generate import Sampling, Steps, generate
from measure import commit, device_name
from model import Transformer, prefill_plan
from quantize import QUANTIZERS, load_model
from tokenizer import load_tokenizer

CHECKPOINT = Path(__file__).resolve().parent.parent / "checkpoints/SmolLM2-135M-Instruct"
CPU, F32 = torch.device("cpu"), torch.float32
PROMPTS = (
    "Once upon a time",
    "The three largest planets of the solar system are",
    "def fibonacci(n):\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is the capital of France?\nA:",
    "In 1969, the first human being",
    "The recipe needs two eggs, a cup of flour and",
)


def losses(model: Transformer, window: torch.Tensor) -> float:
    """Mean negative log-likelihood in nats of tokens 1.. of a window [1, T]."""
    (parts,) = prefill_plan(window.shape[1], window.shape[1])
    total = 0.0
    for base, height, first, stop in parts:
        rows = torch.zeros(1, height, dtype=torch.int64)
        rows[:, first:stop] = window[:, base + first : base + stop]
        (x,) = model([rows], [torch.tensor([base, first, stop])], decode=False)
        targets = window[0, base + first + 1 : base + stop + 1]
        logits = model.logits(x[:, first : first + len(targets)])[0].float()
        total += F.cross_entropy(logits, targets, reduction="sum").item()
    return total / (window.shape[1] - 1)


def evaluate(scheme: str | None, keep_head: bool, windows: list[torch.Tensor]) -> list[float]:
    model, _ = load_model(open_checkpoint(CHECKPOINT), CPU, F32, scheme, keep_head)
    model.setup_caches(1, windows[0].shape[1])
    return [losses(model, w) for w in windows]


def texts(scheme: str | None, keep_head: bool) -> list[list[int]]:
    tokenizer = load_tokenizer(CHECKPOINT)
    model, _ = load_model(open_checkpoint(CHECKPOINT), CPU, F32, scheme, keep_head)
    model.setup_caches(1, 128)
    prompts = [torch.tensor([tokenizer.encode(p)]) for p in PROMPTS]
    return [torch.cat(list(generate(model, p, 64, Sampling(0), 512, Steps())), 1)[0].tolist() for p in prompts]


def main(args: argparse.Namespace) -> int:
    print(f"torch {torch.__version__}, {device_name(CPU)}, {torch.get_num_threads()} threads, commit {commit()}")
    failed = False
    if "int4wo-32" in args.schemes:
        same = [a == b for a, b in zip(texts(None, False), texts("int4wo-32", True))]
        print(f"int4wo-32, float head: {sum(same)} of {len(same)} greedy texts of 64 tokens equal the unquantized ones")
        failed |= not all(same)
    ids = load_tokenizer(CHECKPOINT).encode("\n\n".join(topics[key] for key in sorted(topics)))
    windows = [torch.tensor([ids[i * 1024 : (i + 1) * 1024]]) for i in range(args.windows)]
    reference = evaluate(None, False, windows)
    print(f"float32: perplexity {math.exp(statistics.fmean(reference)):.3f} ({args.windows} windows of 1024 tokens)")
    for scheme in args.schemes:
        for keep_head in (True, False):
            change = [a - b for a, b in zip(evaluate(scheme, keep_head, windows), reference)]
            loss = math.expm1(statistics.fmean(change)) * 100
            error = statistics.stdev(change) / math.sqrt(len(change)) * 100
            head = "float head" if keep_head else "int8 head and embedding"
            print(f"{scheme}, {head}: perplexity {loss:+.2f} % (standard error {error:.2f})", flush=True)
            failed |= scheme == "int4wo-32" and not keep_head and loss > 0.1
    return int(failed)


if __name__ == "__main__":
    parser = Parser("check_weights.py", description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=whole(2), default=8, help="default: %(default)s")
    parser.add_argument("--schemes", nargs="+", choices=QUANTIZERS, default=["int4wo-32", "int8wo", "int4wo-64"])
    torch.set_grad_enabled(False)
    sys.exit(main(parser.parse_args()))
