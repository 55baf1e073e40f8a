"""What the programs of this repository share at their command lines: errors of one line, numbers with limits, folders that
appear whole or not at all."""

import argparse
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tokenizer import SETTINGS_FILES, TOKENIZERS


class Parser(argparse.ArgumentParser):
    """Errors are one line, status 2; flags are written out."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str):
        self.exit(2, f"{Path(self.prog).name}: {' '.join(message.split())}\n")


def whole(low: int) -> Callable[[str], int]:
    """An argument's type: a whole number of at least `low`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= value < 2**31:
            raise argparse.ArgumentTypeError(f"{value} is not between {low} and {2**31 - 1}")
        return value

    return parse


def real(low: float, high: float) -> Callable[[str], float]:
    """An argument's type: a number between `low` and `high`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not between {low} and {high}")
        return value

    return parse


def check_writable(flag: str, path: str | None) -> None:
    """A file that cannot be written is known before the run, not after it."""
    if path is None:
        return
    try:
        new = not os.path.exists(path)
        if not new and stat.S_ISFIFO(os.stat(path).st_mode):
            raise ValueError(f"{flag} {path}: a pipe, which would wait for a reader; name a file")
        with open(path, "a"):
            pass
        if new:  # a run that fails leaves no empty file behind
            os.unlink(path)
    except OSError as e:
        raise ValueError(f"{flag} {path}: {e.strerror}") from None


def run(parser: Parser, main: Callable[[argparse.Namespace], int | None], argv: list[str]) -> int:
    """The exit status of a program: 2 and one line for what a user did wrong, 1 and one line where a file or a pipe failed
    on the way, 130 after Ctrl-C."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller: what we print must not end up in another file
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open until the process ends
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")
    args = parser.parse_args(argv)
    try:
        return main(args) or 0
    except ValueError as e:
        parser.error(str(e))
    except OSError as e:
        with suppress(OSError):
            print(f"{Path(parser.prog).name}: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def print_lines(lines: Iterable[str]) -> None:
    """An answer on stdout, line by line as it is known; a reader who has gone (`| head`) ends it quietly."""
    try:
        for line in lines:
            print(line, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains at its exit


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder to write into; it becomes `out` at the end, and is removed where the end is not reached. ValueError if `out`
    exists with something in it."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out}: there already; remove it or name another folder")
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(out)
    except OSError as e:
        raise ValueError(f"{out}: {e.strerror or e}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_tokenizer(source: Path | dict[str, dict], folder: Path) -> None:
    """A checkpoint's `tokenizer_source` into a folder: its files as they are, or those that a GGUF file's metadata make."""
    if isinstance(source, dict):
        for name, content in source.items():
            (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        return
    for name in (*TOKENIZERS, *SETTINGS_FILES):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        print(f"note: {source} has no tokenizer ({' or '.join(TOKENIZERS)}): put one into the new folder", file=sys.stderr)
