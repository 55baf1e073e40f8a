"""Peak memory against context, of what generate.py --write_result wrote: python scripts/plot_results.py FILE [--out PNG]

One panel for each model, one line for each mode: solid where the prompt fills the context, dashed where it is short; beside
them what was published for Llama-3.1-8B. `--markdown` prints a table instead. Simulated and measured peaks are never mixed.
A line that is damaged, or of a run that failed, is named on stderr and left out; the exit status is then 1. GB = 1e9 bytes.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

# A script's own folder is on the path, not the repository's root, where the modules stand.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from cli import Parser, check_writable, run

# pytorch/ao pull request 738, https://github.com/pytorch/ao/pull/738: peak GB by context, a prompt of 6 tokens on one A100.
PUBLISHED_MODEL, PUBLISHED_SOURCE = "Llama-3.1-8B", "pytorch/ao pull request 738, one A100, 6-token prompt"
PUBLISHED = {
    "normal": {8192: 17.86, 16384: 19.81, 32768: 23.83, 65536: 33.5, 131072: 59.27},
    "kv_quant": {8192: 17.52, 16384: 18.75, 32768: 21.72, 65536: 29.54, 131072: 52.62},
    "kv_quant + linear": {8192: 17.47, 16384: 18.48, 32768: 20.64, 65536: 25.24, 131072: 34.18},
    "int4wo-64 + kv_quant + linear": {131072: 18.9},
}
COMPILED = "int4wo-64 + kv_quant + linear"  # of the published modes
SOURCES = {"simulated": "simulated", "cuda": "measured", "rss": "host memory, measured"}
COLOURS = ("#2f6690", "#d9772b", "#7b4f9d", "#2a9d5c", "#d6336c", "#9c6644", "#6c757d", "#c9a227")
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "text.parse_math": False}


# --- reading ---


def one_line(value) -> str:
    return " ".join(str(value).split())


@dataclass(frozen=True)
class Cell:
    """Where a result belongs; a later result for the same place replaces an earlier one."""

    model: str
    context: int
    mode: str
    filled: bool
    source: str  # of the peak
    card: str

    @property
    def order(self) -> tuple:
        """Rows of a table: by context, then from the plain mode to the one with most changes."""
        return self.context, self.mode != "normal", self.mode.count("+"), self.mode


@dataclass(frozen=True)
class Peak:
    """A result: peak GB, whether they are an estimate, and the whole line."""

    gb: float
    estimate: bool
    line: dict


def mode_of(r: dict) -> str:
    """The weights, the cache, the mask and the rows, as far as they are not the usual ones."""
    cache = r["kv_cache_quantization"]
    weights = r["quantization"] or (r["precision"] if r["precision"] != "bfloat16" else None)
    rows = r.get("batch_size", 1)
    parts = [weights, "kv_quant" if cache == "int8" else cache and f"kv_quant {cache}",
             "linear" if r["linear_causal_mask"] else None, f"{rows} rows" if rows > 1 else None]  # fmt: skip
    return " + ".join(one_line(p) for p in parts if p) or "normal"


def read_line(r: dict) -> tuple[Cell, Peak]:
    """A result and its place. ValueError, LookupError, TypeError or AttributeError for what is none."""
    context, prompt, gb = r["cache_size"], r["prompt_tokens"], r["peak_memory_gb"]
    for key, value in (("cache_size", context), ("prompt_tokens", prompt), ("peak_memory_gb", gb)):
        if isinstance(value, bool) or not 0 < value < 2**31:
            raise TypeError(f"{key} is {value}")
    if r["peak_memory_source"] not in SOURCES:
        raise TypeError(f"peak_memory_source is {r['peak_memory_source']}")
    card = one_line(r.get("device_name", "unknown"))
    cell = Cell(one_line(r["model"]), int(context), mode_of(r), prompt > context / 2, r["peak_memory_source"], card)
    return cell, Peak(float(gb), bool(r.get("estimate")), r)


def read_results(file: Path) -> tuple[dict[Cell, Peak], list[str]]:
    """Results by their place, and a warning for each line that gave none."""
    results, warnings = {}, []
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            r = json.loads(line)
            if "error" in r:
                what = f"a run that failed (status {r['status']}: {r['error'].removeprefix('generate.py: ')})"
                warnings.append(f"{file}:{number}: {one_line(what)}, left out")
                continue
            cell, peak = read_line(r)
            results[cell] = peak
        except (ValueError, RecursionError) as e:
            warnings.append(f"{file}:{number}: damaged, left out ({one_line(e)})")
        except (LookupError, TypeError, AttributeError) as e:
            warnings.append(f"{file}:{number}: no result of generate.py, left out ({one_line(repr(e))})")
    return results, warnings


def published(cell: Cell) -> float | None:
    """Peak GB that somebody else measured."""
    same = cell.model.removeprefix("Meta-").removesuffix("-Instruct") == PUBLISHED_MODEL
    return PUBLISHED.get(cell.mode, {}).get(cell.context) if same else None


def by_model(results: dict[Cell, Peak]) -> dict[str, dict[Cell, Peak]]:
    """In the file's order; the cells of each in a table's order."""
    models: dict[str, dict[Cell, Peak]] = {cell.model: {} for cell in results}
    for cell in sorted(results, key=lambda cell: cell.order):
        models[cell.model][cell] = results[cell]
    return models


def series_names(results: dict[Cell, Peak]) -> dict[tuple[bool, str, str], str]:
    """What kinds of peaks there are, by (filled, source, card): their names, short prompts first. A card is named where
    there are several of its kind."""
    names = {}
    for filled, source, card in sorted({(c.filled, c.source, c.card) for c in results}):
        prompts = {
            p.line["prompt_tokens"] for c, p in results.items() if (c.filled, c.source, c.card) == (filled, source, card)
        }
        prompt = "context filled" if filled else f"{prompts.pop()}-token prompt" if len(prompts) == 1 else "short prompt"
        several = len({c.card for c in results if c.source == source}) > 1
        names[filled, source, card] = f"{prompt} ({SOURCES[source]}{f' on {card}' if several else ''})"
    return names


def circumstances(results: dict[Cell, Peak]) -> str:
    """One line on what lies behind the numbers."""
    lines = [p.line for p in results.values()]

    def listed(what: str, key: str) -> str:
        return f"{what} {', '.join(sorted({one_line(r.get(key)) for r in lines}))}"

    cards = sorted({f"{SOURCES[c.source]} on {c.card}" for c in results})
    parts = [listed("torch", "torch"), *cards, listed("prefill chunk", "prefill_chunk"), listed("commit", "commit")]
    parts.append("GB = 1e9 bytes")
    if any(p.estimate for p in results.values()):
        parts.append("≈: an estimate, compiled code was simulated uncompiled")
    if any(published(c) for c in results):
        compiled = any(published(c) for c in results if c.mode == COMPILED)
        parts.append(f"published: {PUBLISHED_SOURCE}" + (f", {COMPILED} compiled" if compiled else ""))
    return "; ".join(parts) + "."


# --- the table ---


def markdown(results: dict[Cell, Peak]) -> list[str]:
    """Lines of a table for each model, and one line below it."""
    lines = []
    for model, found in by_model(results).items():
        names, theirs = series_names(found), any(published(c) for c in found)
        titles = ["context", "mode", *(["published"] if theirs else []), *names.values()]
        rows: dict[tuple[int, str], dict[str, str]] = {}
        for cell, peak in found.items():
            row = rows.setdefault((cell.context, cell.mode), {"context": f"{cell.context:,}", "mode": cell.mode})
            if (other := published(cell)) is not None:
                row["published"] = f"{other:.2f}"
            row[names[cell.filled, cell.source, cell.card]] = "≈ " * peak.estimate + f"{peak.gb:.2f}"
        grid = [titles, ["---" if t == "mode" else "---:" for t in titles]]
        grid += [[row.get(t, "") for t in titles] for row in rows.values()]
        lines += [f"Peak GB of {model}:", ""]
        lines += ["| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in grid]
        lines += ["", circumstances(found), ""]
    return lines[:-1]


# --- drawing ---


def short(context: int) -> str:
    return f"{context // 1024}k" if context % 1024 == 0 else f"{context:,}"


def draw_figure(results: dict[Cell, Peak]):
    """A matplotlib Figure with a panel for each model."""
    import matplotlib
    from matplotlib.figure import Figure

    models = by_model(results)
    modes = dict.fromkeys(c.mode for c in sorted(results, key=lambda cell: cell.order))
    colours = {mode: COLOURS[i % len(COLOURS)] for i, mode in enumerate(modes)}
    with matplotlib.rc_context(STYLE):
        figure = Figure((max(7, 5 * len(models)), 5.4), dpi=150, layout="constrained")
        for ax, (model, found) in zip(figure.subplots(1, len(models), squeeze=False)[0], models.items()):
            ax.set_title(f"{model}, peak memory", weight="bold", size=10)
            draw_panel(ax, found, colours)
        draw_legend(figure, results, colours)
    return figure


def line_style(filled: bool, source: str) -> dict:
    """Dashes upon a pale band can be told from it where both lie at the same height, as they often do."""
    line = {"linewidth": 4.5, "alpha": 0.4} if filled else {"linewidth": 1.4, "linestyle": (0, (4, 2))}
    return line | {"marker": {"simulated": ".", "cuda": "s", "rss": "^"}[source], "markersize": 6}


def draw_panel(ax, found: dict[Cell, Peak], colours: dict[str, str]) -> None:
    for filled, source, card in series_names(found):
        for mode, colour in colours.items():
            points = [(c.context, p.gb) for c, p in found.items()
                      if (c.mode, c.filled, c.source, c.card) == (mode, filled, source, card)]  # fmt: skip
            if points:
                ax.plot(*zip(*sorted(points)), color=colour, **line_style(filled, source))
    theirs = {(c.context, c.mode): gb for c in found if (gb := published(c)) is not None}
    for (context, mode), gb in theirs.items():
        ax.plot([context], [gb], "o", markersize=7, markerfacecolor="none", markeredgecolor=colours[mode])
    contexts = sorted({c.context for c in found})
    ax.set_xticks(contexts, map(short, contexts))
    ax.set_xlabel("context: slots of the KV cache" + " (k = 1024)" * any(c % 1024 == 0 for c in contexts))
    ax.set_xlim(0, 1.1 * contexts[-1])
    ax.set_ylim(0, 1.08 * max([*theirs.values(), *(p.gb for p in found.values())]))
    ax.set_ylabel("GB (1e9 bytes)")
    at_end = [(c.mode, p.gb) for c, p in found.items() if c.context == contexts[-1]]
    at_end.sort(key=lambda point: -point[1])  # where two lie close together, the higher one is told: the filled context
    draw_numbers(ax, contexts[-1], at_end + [(m, gb) for (c, m), gb in theirs.items() if c == contexts[-1]], colours)
    ax.set_axisbelow(True)
    ax.grid(color="#e5e5e5", linewidth=0.6)


def draw_numbers(ax, context: int, points: list[tuple[str, float]], colours: dict[str, str]) -> None:
    """GB beside the last points, as long as there is room for them."""
    told: list[float] = []
    for mode, gb in points:
        if all(abs(gb - other) > 0.029 * ax.get_ylim()[1] for other in told):
            told.append(gb)
            ax.annotate(f"{gb:.2f}" if gb >= 1 else f"{gb:.3g}", (context, gb), (8, 0), textcoords="offset points", size=8,
                        color=colours[mode], va="center")  # fmt: skip


def draw_legend(figure, results: dict[Cell, Peak], colours: dict[str, str]) -> None:
    """The colours of the modes, then the kinds of peaks, in grey."""
    from matplotlib.lines import Line2D

    modes = [Line2D([], [], color=colour, linewidth=3, label=mode) for mode, colour in colours.items()]
    estimates = {(c.filled, c.source, c.card) for c, p in results.items() if p.estimate}
    kinds = [
        Line2D([], [], color="#404040", label=name + ", some an estimate" * (kind in estimates), **line_style(*kind[:2]))
        for kind, name in reversed(series_names(results).items())
    ]
    if any(published(c) for c in results):
        compiled = f" ({COMPILED.split()[0]}: compiled)" if any(published(c) for c in results if c.mode == COMPILED) else ""
        kinds.append(Line2D([], [], color="none", marker="o", markersize=7, markeredgecolor="#404040",
                            label=f"published: {PUBLISHED_SOURCE}{compiled}"))  # fmt: skip
    figure.legend(handles=modes, loc="outside upper center", ncols=min(4, len(modes)), frameon=False)
    figure.legend(handles=kinds, loc="outside lower center", frameon=False, handlelength=3.5, fontsize=8)


# --- the program ---


def main(args: argparse.Namespace) -> int:
    out = args.out or (None if args.markdown else args.file.with_suffix(".png"))
    if out:
        try:
            import matplotlib.figure  # noqa: F401 - it may be absent
        except ImportError:
            raise ValueError(f"drawing needs the package matplotlib: {sys.executable} -m pip install matplotlib") from None
        if out.resolve() == args.file.resolve():
            raise ValueError(f"--out {out}: this is the file to be drawn")
        check_writable("--out", str(out))
    try:
        results, warnings = read_results(args.file)
    except OSError as e:
        raise ValueError(f"{args.file}: {e.strerror}") from None
    for warning in warnings:
        print(warning, file=sys.stderr)
    if args.context:
        results = {cell: peak for cell, peak in results.items() if cell.context in args.context}
    if not results:
        print(f"{args.file}: no results", file=sys.stderr)
        return 1
    if args.markdown:
        print("\n".join(markdown(results)))
    if out:
        draw_figure(results).savefig(out)
    return 1 if warnings else 0


def cli(argv: list[str]) -> int:
    parser = Parser("plot_results.py", description="Draw peak memory against context.")
    parser.add_argument("file", type=Path, metavar="FILE", help="JSON lines of generate.py --write_result")
    parser.add_argument("--out", type=Path, metavar="PNG", help="default: FILE's name with .png; none with --markdown")
    parser.add_argument("--markdown", action="store_true", help="print a table")
    parser.add_argument("--context", type=int, nargs="+", metavar="N", help="these contexts alone")
    return run(parser, main, argv)


if __name__ == "__main__":
    sys.exit(cli(sys.argv[1:]))
