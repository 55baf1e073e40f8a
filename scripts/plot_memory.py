"""Draws memory snapshots, side by side on one scale: python scripts/plot_memory.py FILE [FILE ...] [--out PNG]

A snapshot is what `generate.py --memory_profile FILE` wrote, or `torch.cuda.memory._snapshot()` pickled. For every allocator
in it: bytes allocated by category after each of its events, above them what it reserved, and the peak. GB = 1e9 bytes, as
requested from the allocator. Nothing but plain values is unpickled, so a stranger's file cannot run code.
"""

import argparse
import math
import pickle
import sys
import textwrap
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

# A script's own folder is on the path, not the repository's root, where the modules stand.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from cli import Parser, check_writable, run

CATEGORIES = {  # from the bottom: what stays lies below what comes and goes
    "weights": "#2f6690", "KV cache": "#d9772b", "mask": "#7b4f9d", "tables": "#8a8a8a", "scratch": "#9c6644",
    "workspace": "#c9a227", "loading": "#8ecae6", "activations": "#2a9d5c", "logits and sampling": "#d6336c",
    "unknown": "#c4c4c4",
}  # fmt: skip
LIGHT = ("tables", "workspace", "loading", "unknown")  # with black letters on them
ROWS = {category: row for row, category in enumerate(CATEGORIES)}
UNKNOWN = ROWS["unknown"]
RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
INK, ALARM = "#1a1a1a", "#c1121f"
MOST_POINTS = 20_000  # of one picture; a screen has fewer columns
MOST_BYTES = 2**46  # no card has as many: a larger size is damage
WIDTH = 10  # of a picture, in inches
STYLE = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "text.parse_math": False}


# --- reading ---


class PlainUnpickler(pickle.Unpickler):
    """Refuses whatever is more than dicts, lists, strings and numbers."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it holds {module}.{name}, a snapshot holds plain values only")


@dataclass(frozen=True)
class Trace:
    """What one allocator did. Column 0 is what was there before the first event, column i what was after the i-th."""

    source: str
    categories: np.ndarray  # bytes [category, column]
    reserved: np.ndarray | None  # bytes [column]; None where the allocator knows no segments
    phases: list[str | None]  # of every event
    refused: list[tuple[int, int]]  # (column, bytes asked for) where memory ran out

    @property
    def allocated(self) -> np.ndarray:
        return self.categories.sum(0)

    @property
    def top(self) -> np.ndarray:
        """What the peak is a peak of: bytes reserved where they are known, else allocated."""
        return self.allocated if self.reserved is None else self.reserved

    @property
    def peak(self) -> int:
        """The first column with the most bytes."""
        return int(self.top.argmax())

    @property
    def peak_phase(self) -> str | None:
        return self.phases[self.peak - 1] if self.peak else None


def read_traces(file: Path) -> list[Trace]:
    """The traces of every device that did something. ValueError of one line for a file that is no snapshot."""
    try:
        with open(file, "rb") as f:
            snapshot = PlainUnpickler(f).load()
    except OSError as e:
        raise ValueError(f"{file}: {e.strerror}") from None
    except Exception as e:  # damaged pickles raise nearly everything
        raise ValueError(f"{file}: no memory snapshot ({type(e).__name__}: {e})") from None
    try:
        source, segments = " ".join(str(snapshot.get("source", "torch snapshot")).split()), snapshot["segments"]
        traces = [
            follow(events, [s for s in segments if s.get("device", device) == device], source)
            for device, events in enumerate(snapshot["device_traces"])
            if events
        ]
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as e:
        raise ValueError(f"{file}: no memory snapshot, or a damaged one ({type(e).__name__}: {e})") from None
    if not traces:
        raise ValueError(f"{file}: no events were recorded")
    return traces


def checked(size: int) -> int:
    if not isinstance(size, int) or not 0 <= size <= MOST_BYTES:
        raise ValueError(f"a size of {size!r}")
    return size


def follow(events: list[dict], segments: list[dict], source: str) -> Trace:
    """Add up events; what is known to have been there before them is put first."""
    steps = np.zeros((len(CATEGORIES), len(events) + 1), np.int64)
    reserved = np.zeros(len(events) + 1, np.int64)
    live, refused = {}, []  # live: row and bytes, by address
    for column, e in enumerate(events, 1):
        action = e["action"]
        if action == "alloc":
            freed = live.get(e["addr"])  # here its free was not recorded
            live[e["addr"]] = row, size = ROWS.get(e.get("category"), UNKNOWN), checked(e["size"])
            steps[row, column] += size
        elif action == "free_completed":
            freed = live.pop(e["addr"], None)
            if freed is None:  # allocated before the recording began
                freed = ROWS.get(e.get("category"), UNKNOWN), checked(e["size"])
                steps[freed[0], 0] += freed[1]
        else:
            freed = None
            reserved[column] = RESERVED.get(action, 0) * checked(e.get("size", 0))
            if action == "oom":
                refused.append((column, checked(e["size"])))
        if freed:
            steps[freed[0], column] -= freed[1]
    steps[UNKNOWN, 0] += sum(size for address, size in blocks_in_use(segments) if address not in live)
    end, change = sum(checked(s["total_size"]) for s in segments), reserved.cumsum()
    reserved[0] = max(0, end - int(change[-1]), -int(change.min()))
    phases = [e.get("phase") for e in events]
    return Trace(source, steps.cumsum(1), reserved.cumsum() if reserved.any() else None, phases, refused)


def blocks_in_use(segments: list[dict]) -> list[tuple[int, int]]:
    """(address, bytes) of what is allocated at the end."""
    found = []
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"].startswith("active"):
                found.append((address, checked(block.get("requested_size", block["size"]))))
            address += block["size"]
    return found


def phase_starts(phases: list[str | None]) -> list[tuple[int, str]]:
    """(column, name) where phases begin; all chunks of a prefill are one."""
    short = ["prefill" if str(p).startswith("prefill") else p for p in phases]
    return [(i, str(b)) for i, (a, b) in enumerate(pairwise([None, *short])) if b != a and b is not None]


def visible(trace: Trace, most: int = MOST_POINTS) -> np.ndarray:
    """The columns to draw: all, or of each of many equal stretches the first, the lowest and the highest ones."""
    n, allocated = trace.categories.shape[1], trace.allocated
    if n <= most:
        return np.arange(n)
    kept = {n - 1}
    for first, stop in pairwise(np.linspace(0, n, most // 4 + 1).astype(int)):
        part = allocated[first:stop]
        kept |= {first, first + part.argmin(), first + part.argmax(), first + trace.top[first:stop].argmax()}
    return np.array(sorted(kept))


def amount(size: float, digits: int = 2) -> str:
    """In GB, with `digits` decimals, or as many as it takes to show two digits."""
    gb = size / 1e9
    return f"{gb:.{max(digits, 1 - math.floor(math.log10(gb))) if gb else digits}f} GB"


def describe(trace: Trace) -> str:
    reserved = "" if trace.reserved is None else f"peak reserved {amount(trace.reserved.max(), 3)}, "
    phase = f", in phase '{trace.peak_phase}'" if trace.peak_phase else ""
    return f"{trace.source}, {reserved}peak requested {amount(trace.allocated.max(), 3)}{phase}"


# --- drawing ---


def draw_figure(traces: list[Trace], labels: list[str], title: str | None = None):
    """A matplotlib Figure with a panel for each trace, all on one scale."""
    import matplotlib
    from matplotlib.figure import Figure

    columns = min(len(traces), 4)
    rows = -(-len(traces) // columns)
    sources = {t.source for t in traces}
    note = f"{sources.pop()}; GB = 1e9 bytes" if len(sources) == 1 else "GB = 1e9 bytes"
    highest = max(int(max(t.top.max(), t.allocated.max())) for t in traces) / 1e9
    words = 1.45 if any(phase_starts(t.phases) for t in traces) else 1.3  # room for them above the peak
    with matplotlib.rc_context(STYLE):
        figure = Figure((WIDTH, 0.6 + 3.4 * rows), dpi=150, layout="constrained")
        panels = figure.subplots(rows, columns, sharey=True, squeeze=False)
        for ax in panels.flat[len(traces) :]:
            ax.set_axis_off()
        for ax in panels[:, 0]:
            ax.set_ylabel("GB")
        for ax, trace, label in zip(panels.flat, traces, labels):
            ax.set_ylim(0, highest * words or 1)
            ax.set_title(f"{label}\n{trace.source}" if sources else label, weight="bold", size=9)
            draw_panel(ax, trace, WIDTH / columns)
        figure.suptitle(f"{title or 'Allocated memory'} ({note})", size=10)
        draw_legend(figure, traces, highest)
    return figure


def draw_panel(ax, trace: Trace, inches: float) -> None:
    """Areas from the bottom to the top, the reserved line, the peak and the phases. `inches`: the panel's width."""
    events = len(trace.phases)
    x = visible(trace)
    heights = trace.categories[:, x] / 1e9
    tops = heights.cumsum(0)
    for row, (category, colour) in enumerate(CATEGORIES.items()):
        if heights[row].any():
            ax.fill_between(x, tops[row] - heights[row], tops[row], step="post", color=colour, linewidth=0)
            draw_name(ax, x, heights[row], tops[row], category, inches)
    if trace.reserved is not None:
        ax.step(x, trace.reserved[x] / 1e9, where="post", color=INK, linewidth=1)
    draw_phases(ax, trace, inches)
    draw_peak(ax, trace)
    draw_refusals(ax, trace)
    ax.set_xlim(0, events)
    ax.set_xlabel("allocator events")
    ax.locator_params("x", nbins=4, integer=True)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set_axisbelow(True)
    ax.grid(axis="y", color="#e5e5e5", linewidth=0.6)


def draw_name(ax, x: np.ndarray, heights: np.ndarray, tops: np.ndarray, category: str, inches: float) -> None:
    """A category's name and its bytes, where its area stays near its highest for long and can hold them."""
    high = heights >= max(0.05 * ax.get_ylim()[1], 0.9 * heights.max())
    edges = np.flatnonzero(np.diff(np.concatenate(([False], high, [False])).astype(int)))
    first, last = max(zip(edges[::2], edges[1::2] - 1), key=lambda run: x[run[1]] - x[run[0]], default=(0, 0))
    if x[last] - x[first] < x[-1] * 1.15 / inches:
        return
    middle = (x[first] + x[last]) / 2
    at = np.searchsorted(x, middle)
    ax.text(
        middle, tops[at] - heights[at] / 2, f"{category} {amount(heights[at] * 1e9)}", ha="center", va="center",
        color="black" if category in LIGHT else "white", bbox={"boxstyle": "square,pad=0.1", "color": CATEGORIES[category]},
    )  # fmt: skip


def draw_phases(ax, trace: Trace, inches: float) -> None:
    """A thin line where a phase begins; its name on top, moved on where the one before needs the place."""
    letter = len(trace.phases) * 0.13 / inches
    free = letter / 2
    for column, name in phase_starts(trace.phases):
        ax.axvline(column, 0, 0.825, color="#606060", linewidth=0.6, linestyle=(0, (4, 2)))
        free = max(column, free)
        ax.text(free, 0.835, name, rotation=90, size=7, color="#404040", ha="center", va="bottom",
                transform=ax.get_xaxis_transform())  # fmt: skip
        free += letter


def side(trace: Trace, column: int) -> str:
    """How words at a column are aligned, to stay within the panel."""
    place = column / len(trace.phases)
    return "left" if place < 0.25 else "right" if place > 0.75 else "center"


def draw_peak(ax, trace: Trace) -> None:
    x, size = trace.peak, trace.top[trace.peak]
    phase = "\nin " + phase_starts([trace.peak_phase])[0][1] if trace.peak_phase else ""
    ax.plot([x], [size / 1e9], "o", color=INK, markersize=5, clip_on=False, zorder=5)
    ax.annotate(
        f"peak {amount(size)}{phase}", (x, size / 1e9), (0, 6), textcoords="offset points", ha=side(trace, x), va="bottom",
        weight="bold", linespacing=1.1, bbox={"boxstyle": "square,pad=0.1", "color": "white", "alpha": 0.85},
    )  # fmt: skip


def draw_refusals(ax, trace: Trace) -> None:
    """A line where memory ran out; words at the last one, where a program ended."""
    for column, _ in trace.refused:
        ax.axvline(column, color=ALARM, linewidth=1.2)
    if trace.refused:
        column, size = trace.refused[-1]
        ax.text(column, 0.98, f" out of memory: {amount(size)} asked for ", color=ALARM, weight="bold",
                ha=side(trace, column), va="top", transform=ax.get_xaxis_transform())  # fmt: skip


def draw_legend(figure, traces: list[Trace], highest: float) -> None:
    """One for all panels. What is nowhere as high as a hair is named, and has no colour to look for."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    most = {c: max(int(t.categories[row].max()) for t in traces) for c, row in ROWS.items()}
    thin = {c: size for c, size in most.items() if 0 < size / 1e9 < 0.004 * highest}
    handles = [Patch(color=colour, label=c) for c, colour in CATEGORIES.items() if most[c] and c not in thin]
    if any(t.reserved is not None for t in traces):
        handles.append(Line2D([], [], color=INK, linewidth=1, label="reserved by the allocator"))
    if thin:
        text = textwrap.fill(f"too thin to see, {amount(max(thin.values()))} at most: {', '.join(thin)}", 64)
        handles.append(Patch(color="none", label=text))
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, handlelength=1.2)


# --- the program ---


def main(args: argparse.Namespace) -> None:
    try:
        import matplotlib.figure  # noqa: F401 - it may be absent
    except ImportError:
        raise ValueError(f"drawing needs the package matplotlib: {sys.executable} -m pip install matplotlib") from None
    out = args.out or args.files[0].with_suffix(".png")
    if out.resolve() in [file.resolve() for file in args.files]:
        raise ValueError(f"--out {out}: this is a snapshot to be drawn")
    check_writable("--out", str(out))
    traces: list[Trace] = []
    names: list[tuple[Path, str]] = []  # file and device, where there are several
    for file in args.files:
        found = read_traces(file)
        traces += found
        names += [(file, f", device {number}" if len(found) > 1 else "") for number in range(len(found))]
    labels = args.labels or [file.stem + device for file, device in names]
    if len(labels) != len(traces):
        raise ValueError(f"--labels: {len(labels)} for {len(traces)} panels")
    for (file, device), trace in zip(names, traces):
        print(f"{file}{device}: {describe(trace)}")
    draw_figure(traces, labels, args.title).savefig(out)
    print(out)


def cli(argv: list[str]) -> int:
    parser = Parser("plot_memory.py", description="Draw memory snapshots, side by side on one scale.")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="of generate.py --memory_profile, or of torch")
    parser.add_argument("--labels", nargs="+", metavar="LABEL", help="one for each panel (default: the files' names)")
    parser.add_argument("--out", type=Path, metavar="PNG", help="default: the first file's name with .png")
    parser.add_argument("--title", help="what all panels have in common")
    return run(parser, main, argv)


if __name__ == "__main__":
    sys.exit(cli(sys.argv[1:]))
