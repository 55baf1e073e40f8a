"""Tiny models and the ways to run them that several test files share."""

import base64
from pathlib import Path

import pytest
import torch

from checkpoint import empty_model, write_checkpoint
from generate import Sampling, Steps, generate, prefill
from model import ModelArgs, Transformer

ROOT = Path(__file__).resolve().parent.parent
SMOLLM2 = ROOT / "checkpoints" / "SmolLM2-135M-Instruct"
needs_inductor = pytest.mark.skipif(" " in torch.__file__, reason="torch cannot link in a path with a space")
GREEDY, EAGER = Sampling(temperature=0), Steps()


def make_model(args: str | ModelArgs = "tiny", dtype: torch.dtype = torch.float32, seed: int = 0) -> Transformer:
    """Random weights with enough spread that logits and greedy choices vary."""
    args = ModelArgs.from_name(args) if isinstance(args, str) else args
    model, shapes = empty_model(args)
    g = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.rand(shape, generator=g) + 0.5 if name.endswith("norm.weight") else
        torch.randn(shape, generator=g) * 1.5 / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }  # fmt: skip
    model.load_state_dict({name: w.to(dtype) for name, w in weights.items()}, assign=True)
    return model.requires_grad_(False)


def random_prompt(T: int, batch: int = 1, seed: int = 1, vocab: int = 500) -> torch.Tensor:
    return torch.randint(vocab, (1, T), generator=torch.Generator().manual_seed(seed)).repeat(batch, 1)


def spoil(model: Transformer) -> None:
    """Fill every cache and the scratch with NaN (integers: a large value): nothing may depend on what is there."""
    for buffer in [t for layer in model.layers for t in layer.attention.kv_cache.stored]:
        buffer.fill_(float("nan") if buffer.is_floating_point() else 101)
    model.shared.scratch.fill_(255)


def stored(model: Transformer, T: int) -> list[torch.Tensor]:
    """A copy of what the caches hold for the first T positions."""
    return [t[:, :, :, :T].clone() for layer in model.layers for t in layer.attention.kv_cache.stored]


def greedy(model: Transformer, prompt: torch.Tensor, n: int, chunk: int = 512, steps: Steps = EAGER) -> list[list[int]]:
    """n greedy tokens of each row."""
    return torch.cat(list(generate(model, prompt, n, GREEDY, chunk, steps)), 1).tolist()


def run_all(model: Transformer, prompt: torch.Tensor, chunk: int, n: int = 5) -> tuple[torch.Tensor, list, list]:
    """Last logits, what is stored for the prompt, and greedy tokens; on spoiled caches."""
    spoil(model)
    logits = prefill(model, prompt, chunk)
    kept = stored(model, prompt.shape[1])
    spoil(model)
    return logits, kept, greedy(model, prompt, n, chunk)


def status_of(cli, argv) -> int:
    """The exit status of a program's `cli(argv)`."""
    try:
        return cli([str(a) for a in argv])
    except SystemExit as e:
        return e.code


def equal(a, b) -> bool:
    """torch.equal over nested lists."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b))
    return a == b


def write_tiny(folder: Path, args: str | ModelArgs = "tiny", dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint of a tiny model with a byte-level Llama 3 tokenizer (ids 0-255 are bytes, 256-511 special)."""
    model = make_model(args, dtype)
    write_checkpoint(folder, model.args, model.state_dict().items())
    lines = (b"%s %d\n" % (base64.b64encode(bytes([i])), i) for i in range(256))
    (folder / "tokenizer.model").write_bytes(b"".join(lines))
    return folder


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))
