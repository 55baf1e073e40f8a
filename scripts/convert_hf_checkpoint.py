"""Turns any checkpoint that can be read into this project's format: python scripts/convert_hf_checkpoint.py
--checkpoint_path PATH [--out FOLDER]

PATH is what generate.py takes: a folder of Hugging Face's or Meta's, a bare model.pth, a GGUF file. Values and dtypes stay
as they are, except that a GGUF file's quantized weights become float32, where their values are exact.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

# A script's own folder is on the path, not the repository's root, where the modules stand.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from checkpoint import Checkpoint, open_checkpoint, write_checkpoint
from cli import Parser, run, whole_folder, write_tokenizer


def default_out(checkpoint: Checkpoint) -> Path:
    """FOLDER-flat beside the checkpoint's folder; FILE-flat beside a GGUF file."""
    path = Path(os.path.abspath(checkpoint.path))
    source = path.with_suffix("") if path.suffix.lower() == ".gguf" else Path(os.path.abspath(checkpoint.folder))
    return source.with_name(f"{source.name}-flat")


def tensors(checkpoint: Checkpoint) -> Iterator:
    entries = list(checkpoint.entries())  # headers only: nothing is read yet
    # disable=None: a bar on a terminal, nothing in a log
    for entry in tqdm(entries, desc="converting", unit="tensor", disable=None):
        yield entry.name, entry.read()


def main(args: argparse.Namespace) -> None:
    checkpoint = open_checkpoint(args.checkpoint_path)
    out = Path(os.path.abspath(args.out)) if args.out else default_out(checkpoint)
    with whole_folder(out) as partial:
        write_checkpoint(partial, checkpoint.args, tensors(checkpoint), checkpoint.quantization)
        write_tokenizer(checkpoint.tokenizer_source, partial)
    print(f"wrote {out}", file=sys.stderr)


def cli(argv: list[str]) -> int:
    parser = Parser("convert_hf_checkpoint.py", description=__doc__.split(":")[0] + ".")
    parser.add_argument("--checkpoint_path", type=Path, required=True, metavar="PATH", help="whatever generate.py reads")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="must not exist yet (default: PATH-flat)")
    return run(parser, main, argv)


if __name__ == "__main__":
    sys.exit(cli(sys.argv[1:]))
