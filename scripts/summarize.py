"""Prints the results that generate.py --write_result wrote as a table: python scripts/summarize.py FILE [--markdown]

What all runs have in common stands above the table once, what they differ in beyond the usual columns becomes a column. A
line that is damaged is named on stderr and left out; the exit status is then 1.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

CONTEXT = ("device", "device_name", "threads", "precision", "compile", "compile_prefill", "keep_head", "batch_size",
           "prefill_chunk", "torch", "commit")  # fmt: skip


def one_line(value) -> str:
    return " ".join(str(value).split())


def rate(key: str) -> Callable[[dict], str]:
    def show(r: dict) -> str:
        sd = r.get(f"{key}_sd")
        return "n/a" if r[key] is None else f"{r[key]:.1f}" + (f" ± {sd:.1f}" if sd is not None else "")

    return show


# title, how a result is shown; the first ones also for a run that failed
IDENTITY = {
    "model": lambda r: one_line(r["model"]),
    "weights": lambda r: r["quantization"] or r["precision"],
    "kv cache": lambda r: r["kv_cache_quantization"] or "plain",
    "mask": lambda r: "linear" if r["linear_causal_mask"] else "square",
    "cache_size": lambda r: f"{int(r['cache_size']):,}",
}
NUMBERS = {
    "prompt": lambda r: f"{int(r['prompt_tokens']):,}",
    "prefill tok/s": rate("prefill_tok_s"),
    "decode tok/s": rate("decode_tok_s"),
    "model GB": lambda r: f"{r['model_gb']:.3f}",
    "KV GB": lambda r: f"{r['kv_cache_gb']:.3f}",
    "peak GB": lambda r: f"{r['peak_memory_gb']:.3f} {one_line(r['peak_memory_source'])}",
}


def asked(command: str) -> dict:
    """What a failed run was asked for, as far as its command line says it."""
    words = shlex.split(command)

    def value(flag: str, bare: str | None = None) -> str | None:
        if flag not in words:
            return None
        after = words[words.index(flag) + 1 :]
        return after[0] if after and not after[0].startswith("--") else bare

    return {
        "model": value("--random_weights") or Path(value("--checkpoint_path") or "").name or "default",
        "quantization": value("--quantization"),
        "precision": (value("--precision") or "bfloat16").removeprefix("torch."),
        "kv_cache_quantization": value("--kv_cache_quantization", "int8"),
        "linear_causal_mask": "--no-linear_causal_mask" not in words,
        "cache_size": value("--cache_size") or 0,
    }


def read_results(file: Path) -> tuple[list[tuple[dict, dict[str, str]]], list[str]]:
    """(result, its cells by title) of every line, and a warning for each line that is none."""
    results, warnings = [], []
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            result = json.loads(line)
            if "error" in result:
                identity = {title: show(asked(result["command"])) for title, show in IDENTITY.items()}
                error = result["error"].removeprefix("generate.py: ")
                cells = identity | {"error": one_line(f"status {result['status']}: {error}")}
            else:
                cells = {title: show(result) for title, show in (IDENTITY | NUMBERS).items()}
            results.append((result, cells))
        except (ValueError, RecursionError) as e:
            warnings.append(f"{file}:{number}: damaged, left out ({one_line(e)})")
        except (LookupError, TypeError, AttributeError) as e:
            warnings.append(f"{file}:{number}: no result of generate.py, left out ({one_line(repr(e))})")
    return results, warnings


def split_context(results: list[dict]) -> tuple[dict[str, str], list[str]]:
    """What all results have in common (key: value), and the keys in which they differ."""
    common, different = {}, []
    for key in CONTEXT:
        values = {one_line(r[key]) for r in results if key in r}
        if len(values) == 1:
            common[key] = values.pop()
        elif values:
            different.append(key)
    return common, different


def table(rows: list[dict[str, str]], markdown: bool) -> list[str]:
    """Lines of a table with the columns that some row has: text to the left, numbers to the right."""
    titles = [t for t in dict.fromkeys(t for row in rows for t in row) if t != "error"]
    titles += ["error"] if any("error" in row for row in rows) else []
    missing = "" if markdown else "-"
    grid = [titles, *([row.get(t, "" if t == "error" else missing) for t in titles] for row in rows)]
    if markdown:
        grid = [[cell.replace("|", "\\|") for cell in line] for line in grid]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    if titles[-1] == "error":
        widths[-1] = len("error")  # the last column, and sentences: not padded
    right = [t in NUMBERS or t == "cache_size" for t in titles]
    lines = [
        [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(line, widths, right, strict=True)] for line in grid
    ]
    rule = ["-" * (w - 1) + (":" if r and markdown else "-") for w, r in zip(widths, right, strict=True)]
    lines.insert(1, rule)
    return ["| " + " | ".join(line) + " |" if markdown else "  ".join(line).rstrip() for line in lines]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="summarize.py", description=__doc__.split(":")[0] + ".")
    parser.add_argument("file", type=Path, metavar="FILE", help="JSON lines of generate.py --write_result")
    parser.add_argument("--markdown", action="store_true", help="a Markdown table instead of aligned text")
    args = parser.parse_args(argv)
    try:
        results, warnings = read_results(args.file)
    except OSError as e:
        print(f"{args.file}: {e.strerror}", file=sys.stderr)
        return 2
    for warning in warnings:
        print(warning, file=sys.stderr)
    if results:
        common, different = split_context([result for result, _ in results])
        if common:
            print("; ".join(f"{key} {value}" for key, value in common.items()) + ". GB = 1e9 bytes.\n")
        rows = [cells | {k: one_line(result[k]) for k in different if k in result} for result, cells in results]
        print("\n".join(table(rows, args.markdown)))
    else:
        print(f"{args.file}: no results", file=sys.stderr)
    return 1 if warnings or not results else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
