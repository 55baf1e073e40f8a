"""Weight-only quantization: int8 per output channel, int4 in groups with scale and minimum; at load or offline.

    python quantize.py --checkpoint_path P --quantization int4wo-64     writes P-int4wo-64/, which loads on any device

What is stored: int4 codes [out, in/2] uint8, the even input in the high nibble, with scales and minima [out, in/group]
float16, w = code * scale + minimum; int8 codes [out, in] with float32 scales [out]. The file depends on no device. The head
and the embedding are int8 per row in every scheme (an int4 head costs 6 % perplexity on the default model, an int8 one
0.04 %), unless `keep_head`.

The phase decides the kernel. Prefill fetches a weight once per chunk, in blocks of rows, into a shared buffer, and
multiplies tile by tile. Decode on a CPU in bfloat16 takes torch's packed operators, which read 4 or 8 bits per weight; there
the packed copy is kept beside the codes, and counted. Elsewhere decode goes the way of prefill for now.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from attention import round_up
from checkpoint import empty_model, load_weights, open_checkpoint, write_checkpoint
from cli import Parser, run, whole_folder, write_tokenizer
from entries import Checkpoint
from model import Call, Embedding, Linear, Transformer

BLOCK_BYTES = 16 * 10**6  # of a dequantized weight at a time: a larger one is multiplied in blocks of its rows
CHUNK = 1 << 20  # values that the int4 body expands at once: stays in a CPU's cache


# --- quantizing and expanding rows ---


def quantize_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows [n, in] -> codes int8 [n, in], scales float32 [n]; symmetric, w = code * scale."""
    rows = rows.float()
    scales = rows.abs().amax(-1) / 127
    codes = (rows / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_().clamp_(-127, 127)
    return codes.to(torch.int8), scales


def quantize_int4(rows: Tensor, groupsize: int) -> tuple[Tensor, Tensor, Tensor]:
    """rows [n, in] -> codes uint8 [n, in/2], scales and minima float16 [n, in/groupsize]. Scale and minimum are rounded
    first and codes chosen for the rounded ones, so weights that lie on a 4-bit grid come back as they were."""
    groups = rows.float().clamp(-65504, 65504).unflatten(-1, (-1, groupsize))  # what a float16 minimum can hold
    low, high = groups.amin(-1), groups.amax(-1)
    scales, minima = ((high - low) / 15).half(), low.half()
    divisor = torch.where(scales == 0, 1, scales.float())
    codes = ((groups - minima.float()[..., None]) / divisor[..., None]).round_().clamp_(0, 15)
    codes = codes.to(torch.uint8).flatten(1)
    return codes[:, 0::2] << 4 | codes[:, 1::2], scales, minima


def nibble_table() -> Tensor:
    """[256, 2] float32: the two codes of each byte."""
    byte = torch.arange(256)
    return torch.stack([byte >> 4, byte & 15], 1).float()


def expand_int4(codes: Tensor, scales: Tensor, minima: Tensor, table: Tensor, scratch: Tensor, out: Tensor) -> None:
    """codes * scales + minima into the start of out (flat, of any float dtype), a few rows at a time. scratch (flat uint8)
    holds the bytes as indices and the values in float32, so nothing is allocated."""
    n, half = codes.shape
    step = max(1, CHUNK // (2 * half))
    out = out[: n * 2 * half].view(n, 2 * half)
    for start in range(0, n, step):
        rows = codes[start : start + step]
        index = scratch[: rows.numel() * 4].view(torch.int32)
        values = scratch[round_up(step * half * 4, 64) :][: rows.numel() * 8].view(torch.float32).view(-1, 2)
        index.copy_(rows.reshape(-1))
        torch.index_select(table, 0, index, out=values)
        groups = values.view(len(rows), scales.shape[1], -1)
        groups.mul_(scales[start : start + step].unsqueeze(-1)).add_(minima[start : start + step].unsqueeze(-1))
        out[start : start + step].copy_(values.view(len(rows), 2 * half))


def expand_int4_scratch_bytes(in_features: int) -> int:
    step = max(1, CHUNK // in_features)
    return round_up(step * in_features * 2, 64) + round_up(step * in_features * 4, 64)


def expand_int8(codes: Tensor, out: Tensor) -> None:
    """The codes [n, in] into the start of out (flat, of any float dtype)."""
    out[: codes.numel()].view(codes.shape).copy_(codes)


# Operators, so that torch.compile sees one write to the buffer. It has the model's dtype: read through a view of another
# one (uint8 as bfloat16), Inductor of torch 2.13 loses sight of it, and multiplies with the next layer's weight.
_library = torch.library.Library("llama_weights", "DEF")
_library.define(
    "expand_int4(Tensor codes, Tensor scales, Tensor minima, Tensor table, Tensor(a!) scratch, Tensor(b!) out) -> ()"
)
_library.define("expand_int8(Tensor codes, Tensor(a!) out) -> ()")
_library.impl("expand_int4", expand_int4, "CompositeExplicitAutograd")
_library.impl("expand_int8", expand_int8, "CompositeExplicitAutograd")
torch.library.register_fake("llama_weights::expand_int4", lambda *args: None, lib=_library)
torch.library.register_fake("llama_weights::expand_int8", lambda *args: None, lib=_library)


# --- layers ---


class QuantizedLinear(nn.Module):
    """Stands where a Linear stood. A subclass holds the codes, takes float rows while loading (`take_rows`), expands rows
    into a buffer, and may bring an operator of its own for decode."""

    def __init__(self, out_features: int, in_features: int):
        super().__init__()
        self.shape = (out_features, in_features)
        self.packed = False

    def block_rows(self, dtype: torch.dtype) -> int:
        """Rows that are expanded and multiplied at a time."""
        return min(self.shape[0], max(1, BLOCK_BYTES // (self.shape[1] * dtype.itemsize)))

    def buffer_sizes(self, dtype: torch.dtype) -> tuple[int, int]:
        """Values of `shared.weight_buffer` and bytes of `shared.weight_scratch` that `forward` needs."""
        return self.block_rows(dtype) * self.shape[1], 0

    def forward(self, xs: list[Tensor], call: Call) -> list[Tensor]:
        if call.decode and self.packed:
            return [self.multiply_packed(x.flatten(0, -2)).unflatten(0, x.shape[:-1]) for x in xs]
        n, step = self.shape[0], self.block_rows(xs[0].dtype)
        if step >= n:
            return self.multiply(xs, 0, n, call)
        ys = [x.new_empty(*x.shape[:-1], n) for x in xs]
        for start in self.visit(range(0, n, step)):
            self.multiply_into(ys, xs, start, min(start + step, n), call)
        return ys

    def visit(self, starts: range) -> Iterable[int]:
        """The first rows of the blocks; a dry run leaves out those that are like others."""
        return starts

    def multiply(self, xs: list[Tensor], start: int, stop: int, call: Call) -> list[Tensor]:
        """The outputs of rows start..stop-1."""
        self.expand(start, stop, call)
        weight = call.shared.weight_buffer[: (stop - start) * self.shape[1]].view(-1, self.shape[1])
        return [self.scale_outputs(F.linear(x, weight), start, stop) for x in xs]

    def multiply_into(self, ys: list[Tensor], xs: list[Tensor], start: int, stop: int, call: Call) -> None:
        for y, part in zip(ys, self.multiply(xs, start, stop, call), strict=True):
            y[..., start:stop] = part

    def expand(self, start: int, stop: int, call: Call) -> None:
        """Write rows start..stop-1 to the start of `shared.weight_buffer`."""
        raise NotImplementedError

    def multiply_packed(self, x: Tensor) -> Tensor:
        """x [n, in] times the weight, by an operator that reads the codes."""
        raise NotImplementedError

    def scale_outputs(self, y: Tensor, start: int, stop: int) -> Tensor:
        return y

    def prepare(self, dtype: torch.dtype, device: torch.device) -> None:
        """Called once the codes are there."""


class Int8Linear(QuantizedLinear):
    """One scale per output channel. The codes are multiplied as they are (exact in every dtype), the outputs scaled."""

    def __init__(self, out_features: int, in_features: int):
        super().__init__(out_features, in_features)
        self.register_buffer("codes", torch.empty(out_features, in_features, dtype=torch.int8))
        self.register_buffer("scales", torch.empty(out_features, dtype=torch.float32))

    def take_rows(self, start: int, rows: Tensor) -> None:
        self.codes[start : start + len(rows)], self.scales[start : start + len(rows)] = quantize_int8(rows)

    def prepare(self, dtype, device):
        # the operator does not check that in_features is a multiple of 16, and is slow in other dtypes
        self.packed = device.type == "cpu" and dtype == torch.bfloat16 and self.shape[1] % 16 == 0
        scales = self.scales.to(dtype) if self.packed else None
        self.register_buffer("packed_scales", scales, persistent=False)

    def multiply_packed(self, x: Tensor) -> Tensor:
        return torch.ops.aten._weight_int8pack_mm(x.contiguous(), self.codes, self.packed_scales)

    def expand(self, start: int, stop: int, call: Call) -> None:
        torch.ops.llama_weights.expand_int8(self.codes[start:stop], call.shared.weight_buffer)

    def scale_outputs(self, y: Tensor, start: int, stop: int) -> Tensor:
        return y.mul_(self.scales[start:stop])


class Int8Embedding(Int8Linear):
    """An int8 row per token; `forward` makes it the head of a model with tied embeddings."""

    def lookup(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        index = tokens.flatten()
        rows = self.codes.index_select(0, index).float() * self.scales.index_select(0, index).unsqueeze(-1)
        return rows.to(dtype).unflatten(0, tokens.shape)


class Int4Linear(QuantizedLinear):
    def __init__(self, out_features: int, in_features: int, groupsize: int):
        super().__init__(out_features, in_features)
        self.groupsize = groupsize
        groups = in_features // groupsize
        self.register_buffer("codes", torch.empty(out_features, in_features // 2, dtype=torch.uint8))
        self.register_buffer("scales", torch.empty(out_features, groups, dtype=torch.float16))
        self.register_buffer("minima", torch.empty(out_features, groups, dtype=torch.float16))
        self.register_buffer("table", nibble_table(), persistent=False)

    def take_rows(self, start: int, rows: Tensor) -> None:
        stop = start + len(rows)
        self.codes[start:stop], self.scales[start:stop], self.minima[start:stop] = quantize_int4(rows, self.groupsize)

    def prepare(self, dtype, device):
        self.table = nibble_table().to(device)
        self.packed = device.type == "cpu" and dtype == torch.bfloat16 and self.shape[0] % 16 == 0
        weight = scales = None
        if self.packed:
            codes = torch.stack([self.codes >> 4, self.codes & 15], -1).flatten(1).to(torch.int32)
            weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
            zeros = self.minima.float() + 8 * self.scales.float()  # the operator's w = (code - 8) * scale + zero
            scales = torch.stack([self.scales.float().T, zeros.T], -1).to(dtype).contiguous()
        self.register_buffer("packed_weight", weight, persistent=False)
        self.register_buffer("packed_scales", scales, persistent=False)

    def multiply_packed(self, x: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.contiguous(), self.packed_weight, self.groupsize, self.packed_scales
        )

    def buffer_sizes(self, dtype):
        return super().buffer_sizes(dtype)[0], expand_int4_scratch_bytes(self.shape[1])

    def expand(self, start: int, stop: int, call: Call) -> None:
        rows, shared = slice(start, stop), call.shared
        torch.ops.llama_weights.expand_int4(
            self.codes[rows], self.scales[rows], self.minima[rows], self.table, shared.weight_scratch, shared.weight_buffer
        )


# --- schemes ---


@dataclass(frozen=True)
class Scheme:
    """How the linear layers are kept: `groupsize` values share scale and minimum in 4 bits; None is int8 per channel."""

    groupsize: int | None

    def layer(self, shape: tuple[int, int]) -> QuantizedLinear | str:
        """The layer that takes the place of a Linear of this shape [out, in], or why there is none."""
        if self.groupsize is None:
            return Int8Linear(*shape)
        if shape[1] % self.groupsize:
            return f"in_features {shape[1]} is no multiple of {self.groupsize}"
        return Int4Linear(*shape, self.groupsize)


QUANTIZERS = {"int8wo": Scheme(None)} | {f"int4wo-{g}": Scheme(g) for g in (32, 64, 128, 256)}
FLOAT_HEAD = "+float-head"  # what a file's name of its scheme ends with when head and embedding were kept


def swap_layers(model: Transformer, quantization: str, keep_head: bool) -> str:
    """Put quantized layers, still on the meta device, in the place of Linear ones. Returns what was done, and what was left
    and why; ValueError if nothing could be quantized."""
    scheme, done, left = QUANTIZERS[quantization], 0, {}
    with torch.device("meta"):
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) not in (Linear, Embedding):
                    continue
                shape = tuple(child.weight.shape)
                if child in (model.output, model.tok_embeddings):
                    layer = None if keep_head else (Int8Embedding if type(child) is Embedding else Int8Linear)(*shape)
                else:
                    layer = scheme.layer(shape)
                    done += not isinstance(layer, str)
                if isinstance(layer, str):
                    left[layer] = left.get(layer, 0) + 1
                elif layer is not None:
                    setattr(parent, name, layer)
    reasons = "; ".join(f"{count} left in float: {why}" for why, count in left.items())
    if not done:
        raise ValueError(f"--quantization {quantization}: no linear layer can be quantized ({reasons})")
    head = "head and embedding " + ("in float" if keep_head else "int8 per row")
    return f"{quantization}: {done} linear layers quantized, {head}" + (f"; {reasons}" if reasons else "")


def chosen_scheme(checkpoint: Checkpoint, quantization: str | None, keep_head: bool) -> tuple[str | None, bool]:
    """The scheme of a file that holds one, or the one asked for. ValueError if they contradict each other."""
    if checkpoint.quantization is None:
        if keep_head and quantization is None:
            raise ValueError("--keep_head needs --quantization")
        return quantization, keep_head
    stored, kept = checkpoint.quantization.removesuffix(FLOAT_HEAD), checkpoint.quantization.endswith(FLOAT_HEAD)
    if stored not in QUANTIZERS:
        raise ValueError(f"{checkpoint.path}: unknown quantization {stored!r}; known: {', '.join(QUANTIZERS)}")
    if quantization not in (None, stored) or (keep_head and not kept):
        asked = f"--quantization {quantization}" if quantization not in (None, stored) else "--keep_head"
        raise ValueError(f"{asked}: {checkpoint.path} is quantized already ({checkpoint.quantization})")
    return stored, kept


def load_model(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, quantization: str | None, keep_head: bool = False
) -> tuple[Transformer, str | None]:
    """Load, quantizing blocks of rows as they are read. Returns the model and a line that says what was quantized. A file
    that is quantized already needs no `quantization`; another one is refused."""
    model, _ = empty_model(checkpoint.args)
    quantization, keep_head = chosen_scheme(checkpoint, quantization, keep_head)
    note = swap_layers(model, quantization, keep_head) if quantization else None
    load_weights(model, checkpoint, device, dtype)
    return model.requires_grad_(False), note


# --- offline ---


def quantized_tensors(checkpoint: Checkpoint, model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a quantized checkpoint, one layer at a time; what is left in float keeps its dtype."""
    layers = dict(model.named_modules())
    # disable=None: a bar on a terminal, nothing in a log
    for entry in tqdm(list(checkpoint.entries()), "quantizing", unit="tensor", disable=None):
        path = entry.name.removesuffix(".weight")
        layer = layers.get(path)
        if not isinstance(layer, QuantizedLinear):
            yield entry.name, entry.read()
            continue
        layer.to_empty(device="cpu")
        start = 0
        for rows in entry.blocks():
            layer.take_rows(start, rows)
            start += len(rows)
        yield from ((f"{path}.{name}", tensor) for name, tensor in layer.state_dict().items())
        layer.to_empty(device="meta")


def build_parser() -> Parser:
    p = Parser("quantize.py", description="Write a quantized checkpoint, which loads on any device and without a flag.")
    p.add_argument("--checkpoint_path", required=True, metavar="PATH", help="whatever generate.py reads")
    p.add_argument("--quantization", required=True, choices=QUANTIZERS, help="the weight scheme")
    p.add_argument("--keep_head", action="store_true", help="leave head and embedding in float")
    p.add_argument("--out", metavar="FOLDER", help="must not exist yet (default: PATH-SCHEME)")
    return p


def main(args: argparse.Namespace) -> None:
    checkpoint = open_checkpoint(args.checkpoint_path)
    if checkpoint.quantization:
        raise ValueError(f"{checkpoint.path} is quantized already ({checkpoint.quantization})")
    source = checkpoint.path.with_suffix("") if checkpoint.tokenizer_files else checkpoint.folder  # a GGUF file, or a folder
    out = Path(args.out) if args.out else source.resolve().with_name(f"{source.resolve().name}-{args.quantization}")
    model, _ = empty_model(checkpoint.args)
    note = swap_layers(model, args.quantization, args.keep_head)
    name = args.quantization + (FLOAT_HEAD if args.keep_head else "")
    with whole_folder(out) as partial:
        write_checkpoint(partial, checkpoint.args, quantized_tensors(checkpoint, model), quantization=name)
        write_tokenizer(checkpoint.tokenizer_source, partial)
    print(f"{note}\nwrote {out}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run(build_parser(), main, sys.argv[1:]))
