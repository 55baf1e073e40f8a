"""What a checkpoint is to the rest of the program, whatever its format: entries under our names, whose rows come in blocks.

Shapes and dtypes stand in the headers; a dry run shares everything but the reading of rows.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from model import ModelArgs

BLOCK_BYTES = 4 * 2**20  # of rows at a time; what quantizes them needs several times as much


@dataclass(frozen=True)
class Part:
    """A tensor as a file has it. `rows(start, stop)` returns a view of the mapped file, or a copy where not `view`; or rows
    that are `made` up, on their device. Blocks are of a multiple of `unit` rows."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Callable[[int, int], Tensor]
    view: bool = True
    unit: int = 1
    made: bool = False

    def hollow(self) -> "Part":
        """The same with rows of any content, so that a dry run reads no file."""
        empty = lambda start, stop: torch.empty(stop - start, *self.shape[1:], dtype=self.dtype)  # noqa: E731
        return self if self.made else replace(self, rows=empty)


@dataclass(frozen=True)
class Entry:
    """One tensor under our name: parts, stacked. All but `blocks` and `read` comes from the headers. `visit` goes through
    the spans (part, start, stop) that `blocks` reads; a dry run leaves some out."""

    name: str
    parts: list[Part]
    visit: Callable[[Iterable], Iterable] = iter

    @property
    def shape(self) -> tuple[int, ...]:
        return stacked_shape(self.parts)

    @property
    def dtype(self) -> torch.dtype:
        return functools.reduce(torch.promote_types, [p.dtype for p in self.parts])

    def blocks(self) -> Iterator[Tensor]:
        """Consecutive rows on the CPU (random weights: on their device): views of the mapped file, not to be written to,
        or copies of at most 64 MB."""
        for part, start, stop in self.visit(self._spans()):
            yield part.rows(start, stop).to(self.dtype)

    def _spans(self) -> Iterator[tuple[Part, int, int]]:
        for p in self.parts:
            row = max(math.prod(p.shape[1:]) * self.dtype.itemsize, 1)
            step = max(BLOCK_BYTES // row // p.unit, 1) * p.unit
            for start in range(0, p.shape[0], step):
                yield p, start, min(start + step, p.shape[0])

    @property
    def mapped(self) -> bool:
        """Whether the file holds the tensor in one piece."""
        return len(self.parts) == 1 and self.parts[0].view

    def read(self) -> Tensor:
        """The whole tensor; a view of the mapped file where it lies there in one piece."""
        return self.parts[0].rows(0, self.shape[0]) if self.mapped else fill(torch.empty(self.shape, dtype=self.dtype), self)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. `folder` has the tokenizer's files, unless `tokenizer_files` makes them (GGUF). `entries(False)`
    leaves out the checks that read weights."""

    path: Path
    folder: Path
    args: ModelArgs
    quantization: str | None  # the scheme that our own format names, else None
    entries: Callable[..., Iterator[Entry]]
    tokenizer_files: Callable[[], dict[str, dict]] | None = None

    @property
    def tokenizer_source(self) -> Path | dict[str, dict]:
        return self.tokenizer_files() if self.tokenizer_files else self.folder

    def hollow(self, visit: Callable[[Entry, Iterable], Iterable]) -> "Checkpoint":
        """The same for a dry run: no weight is read, and `visit` picks the spans of an entry."""
        hollow = [replace(e, parts=[p.hollow() for p in e.parts]) for e in self.entries(False)]
        hollow = [replace(e, visit=functools.partial(visit, e)) for e in hollow]
        return replace(self, entries=lambda check=True: iter(hollow))


def stacked_shape(parts: list[Part]) -> tuple[int, ...]:
    return (sum(p.shape[0] for p in parts), *parts[0].shape[1:])


def fill(result: Tensor, entry: Entry) -> Tensor:
    """Copy the blocks, cast where they are and then moved."""
    for start, rows in numbered(entry):
        result[start : start + len(rows)] = rows.to(result.dtype).to(result.device)
        del rows
    return result


def numbered(entry: Entry) -> Iterator[tuple[int, Tensor]]:
    """(first row, rows) of each block. Nobody may hold one block while the next is made."""
    start = 0
    for rows in entry.blocks():
        step = len(rows)
        yield start, rows
        start += step
        del rows
