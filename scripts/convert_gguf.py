"""Turns a GGUF file of a llama into a checkpoint folder: python scripts/convert_gguf.py FILE.gguf OUT_FOLDER

Weights become float32, where the values of every quantized format are exact. The file can be given to generate.py as it
is, too; the folder loads faster.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

# A script's own folder is on the path, not the repository's root, where the modules stand.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from checkpoint import Entry, open_checkpoint, write_checkpoint
from cli import Parser, run, whole_folder, write_tokenizer


def read_tensors(entries: Iterator[Entry]) -> Iterator[tuple[str, torch.Tensor]]:
    """(our name, float32 tensor), dequantized one at a time."""
    # disable=None: a bar on a terminal, nothing in a log
    for entry in tqdm(list(entries), desc="converting", unit="tensor", disable=None):
        yield entry.name, entry.read().float()


def main(args: argparse.Namespace) -> None:
    checkpoint, out = open_checkpoint(args.file), args.out.resolve()
    if checkpoint.tokenizer_files is None:
        raise ValueError(f"{args.file}: not a GGUF file")
    source = checkpoint.tokenizer_source  # before anything is written: it may be refused
    with whole_folder(out) as partial:
        write_checkpoint(partial, replace(checkpoint.args, name=args.name or out.name), read_tensors(checkpoint.entries()))
        write_tokenizer(source, partial)


def cli(argv: list[str]) -> int:
    parser = Parser("convert_gguf.py", description="Turn a llama's GGUF file into a checkpoint folder.")
    parser.add_argument("file", type=Path, metavar="FILE.gguf")
    parser.add_argument("out", type=Path, metavar="OUT_FOLDER", help="must not exist yet, or be empty")
    parser.add_argument("--name", help="the model's name in reports (default: the name of OUT_FOLDER)")
    return run(parser, main, argv)


if __name__ == "__main__":
    sys.exit(cli(sys.argv[1:]))
