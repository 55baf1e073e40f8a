"""The pictures: memory snapshots, and peak memory against context."""

import importlib.util
import json
import os
import pickle
import random
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, status_of

import generate


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plot_memory, plot_results = map(script, ("plot_memory", "plot_results"))
GB = 10**9


def run(module, capsys, *argv) -> tuple[int, list[str], list[str]]:
    status = status_of(module.cli, argv)
    out, err = capsys.readouterr()
    return status, out.splitlines(), err.splitlines()


# --- snapshots ---


def event(action: str, addr: int, gb: float, **more) -> dict:
    return {"action": action, "addr": addr, "size": int(gb * GB), "stream": 0} | more


EVENTS = [
    event("segment_alloc", 0, 20, phase="load"),
    event("alloc", 0, 16, phase="load", category="weights"),
    event("segment_alloc", 100, 4, phase="set-up"),
    event("alloc", 100, 3, phase="set-up", category="KV cache"),
    event("alloc", 200, 2, phase="prefill chunk 1 of 2", category="activations"),
    event("free_requested", 200, 2, phase="prefill chunk 1 of 2"),
    event("free_completed", 200, 2, phase="prefill chunk 1 of 2", category="activations"),
    event("alloc", 200, 1, phase="prefill chunk 2 of 2", category="a new one"),
    event("segment_alloc", 300, 1, phase="decode"),
    event("free_completed", 200, 1, phase="decode"),
    event("segment_free", 300, 1, phase="decode"),
]
SUMS = {  # after 0, 1, 2, ... events
    "weights": [0, 0, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16],
    "KV cache": [0, 0, 0, 0, 3, 3, 3, 3, 3, 3, 3, 3],
    "activations": [0, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 0],
    "unknown": [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0],
}
RESERVED = [0, 20, 20, 24, 24, 24, 24, 24, 24, 25, 25, 24]


def snapshot(events: list[dict], segments: tuple | list = (), **more) -> dict:
    return {"segments": list(segments), "device_traces": [events]} | more


def write(path: Path, value) -> Path:
    path.write_bytes(pickle.dumps(value))
    return path


def sums(trace, category: str) -> list[float]:
    return (trace.categories[plot_memory.ROWS[category]] / GB).tolist()


def test_sums_are_right_after_every_event(tmp_path):
    (trace,) = plot_memory.read_traces(write(tmp_path / "s", snapshot(EVENTS, source="simulated x")))
    for category in plot_memory.CATEGORIES:
        assert sums(trace, category) == SUMS.get(category, [0] * 12), category
    assert (trace.allocated / GB).tolist() == np.sum(list(SUMS.values()), 0).tolist()
    assert (trace.reserved / GB).tolist() == RESERVED and trace.source == "simulated x"
    assert trace.peak == 9 and trace.peak_phase == "decode" and not trace.refused
    assert plot_memory.phase_starts(trace.phases) == [(0, "load"), (2, "set-up"), (4, "prefill"), (8, "decode")]
    line = "simulated x, peak reserved 25.000 GB, peak requested 21.000 GB, in phase 'decode'"
    assert plot_memory.describe(trace) == line


def test_what_is_drawn_stacks_up_to_the_sums(tmp_path):
    (trace,) = plot_memory.read_traces(write(tmp_path / "s", snapshot(EVENTS)))
    (ax,) = plot_memory.draw_figure([trace], ["name"]).axes
    areas = ax.collections
    assert len(areas) == len(SUMS)
    for column in range(1, 11):  # a stack's height between two events is what was there after the first of them
        inside = [area.get_paths()[0] for area in areas]
        for gb in np.arange(0.25, 26, 0.5):
            covered = sum(path.contains_point((column + 0.5, gb)) for path in inside)
            assert covered == (gb < trace.allocated[column] / GB), (column, gb)
    reserved = ax.lines[0]
    assert reserved.get_ydata().tolist() == RESERVED and reserved.get_drawstyle() == "steps-post"
    (dot,) = [line for line in ax.lines if line.get_marker() == "o"]
    assert (dot.get_xdata()[0], dot.get_ydata()[0]) == (9, 25)
    words = [t.get_text() for t in ax.texts]
    assert "peak 25.00 GB\nin decode" in words and "weights 16.00 GB" in words
    assert [w for w in words if w in ("load", "set-up", "prefill", "decode")] == ["load", "set-up", "prefill", "decode"]
    assert ax.get_xscale() == ax.get_yscale() == "linear" and ax.get_ylim()[0] == 0


def test_a_plain_snapshot_of_torch_that_begins_in_the_middle(tmp_path):
    """No categories, phases or source; something is there before, and is freed, or is still there at the end."""
    segments = [
        {"address": 1000, "total_size": 9 * GB, "device": 1, "blocks": [
            {"size": 2 * GB, "requested_size": 2 * GB - 8, "state": "active_allocated"},
            {"size": 3 * GB, "state": "inactive"}, {"size": 4 * GB, "state": "active_pending_free"}]},
        {"address": 5, "total_size": 77 * GB, "device": 0, "blocks": []},
    ]  # fmt: skip
    third = 1000 + 5 * GB
    events = [
        event("free_requested", 7, 6), event("free_completed", 7, 6), event("segment_unmap", 7, 6),
        event("segment_map", third, 4), event("alloc", third, 4), event("alloc", third, 4), event("snapshot", 0, 0),
        {"action": "oom", "device_free": 1, "size": 50 * GB}, {"action": "a later torch's", "size": 1},
    ]  # fmt: skip
    file = write(tmp_path / "s", {"segments": segments, "device_traces": [[], events, []]})
    (trace,) = plot_memory.read_traces(file)
    there = 2 - 8e-9
    assert sums(trace, "unknown") == pytest.approx([6 + there] * 2 + [there] * 3 + [4 + there] * 5, abs=0)
    assert (trace.reserved / GB).tolist() == [11, 11, 11, 5] + [9] * 6
    assert trace.peak == 0 and trace.peak_phase is None and trace.refused == [(8, 50 * GB)]
    assert plot_memory.describe(trace) == "torch snapshot, peak reserved 11.000 GB, peak requested 8.000 GB"
    (ax,) = plot_memory.draw_figure([trace], ["name"]).axes
    assert any("out of memory: 50.00 GB" in t.get_text() for t in ax.texts)


def test_a_cpu_has_no_reserved_line(tmp_path):
    events = [e for e in EVENTS if not e["action"].startswith("segment")]
    (trace,) = plot_memory.read_traces(write(tmp_path / "s", snapshot(events, source="cpu")))
    assert trace.reserved is None and trace.allocated[trace.peak] == 21 * GB
    figure = plot_memory.draw_figure([trace], ["name"])
    assert not [line for line in figure.axes[0].lines if line.get_drawstyle() == "steps-post"]
    assert "reserved" not in "".join(t.get_text() for t in figure.legends[0].get_texts())


def test_several_share_one_scale_and_one_legend(tmp_path):
    small = [e | {"size": e["size"] // 1000} for e in EVENTS]
    traces = [
        trace for n, events in enumerate([small, EVENTS, small, small, small])
        for trace in plot_memory.read_traces(write(tmp_path / f"{n}", snapshot(events, source=f"card {n > 2}")))
    ]  # fmt: skip
    figure = plot_memory.draw_figure(traces, list("abcde"), "a title")
    drawn = [ax for ax in figure.axes if ax.get_title()]
    assert len(drawn) == 5 and len({ax.get_ylim() for ax in drawn}) == 1 and drawn[0].get_ylim()[1] > 25
    assert [ax.get_title() for ax in drawn][2:4] == ["c\ncard False", "d\ncard True"]
    legend = [t.get_text() for t in figure.legends[0].get_texts()]
    assert legend == ["weights", "KV cache", "activations", "unknown", "reserved by the allocator"]
    assert "a title" in figure.get_suptitle() and "1e9" in figure.get_suptitle()
    legend = plot_memory.draw_figure(traces[:1], ["a"]).legends[0].get_texts()
    assert len(legend) == 5


def test_what_is_too_thin_to_see_is_named(tmp_path):
    events = [*EVENTS, event("alloc", 900, 0.01, category="mask")]
    traces = plot_memory.read_traces(write(tmp_path / "s", snapshot(events)))
    legend = plot_memory.draw_figure(traces, ["a"]).legends[0].get_texts()
    assert legend[-1].get_text() == "too thin to see, 0.010 GB at most: mask"


def test_thinning_never_loses_the_maximum():
    rng = random.Random(0)
    for spike in (1, 40_001, 99_998, *(rng.randrange(1, 99_999) for _ in range(20))):
        steps = [event("alloc" if i % 2 else "free_completed", 1, 1) for i in range(1, 100_001)]
        steps[spike] = steps[spike] | {"action": "alloc", "addr": 2, "size": 5 * GB}
        steps.insert(spike + 1, event("free_completed", 2, 5))
        steps.insert(spike + 2, event("segment_alloc", 9, 9))
        steps.insert(spike + 3, event("segment_free", 9, 9))
        trace = plot_memory.follow(steps, [], "x")
        kept = plot_memory.visible(trace)
        assert len(kept) <= plot_memory.MOST_POINTS and (np.diff(kept) > 0).all()
        assert kept[0] == 0 and kept[-1] == len(steps)
        assert trace.allocated[kept].max() == trace.allocated.max() >= 5 * GB
        assert trace.reserved[kept].max() == 9 * GB and trace.peak in kept
    few = plot_memory.follow(EVENTS, [], "x")
    assert plot_memory.visible(few).tolist() == list(range(12))


def test_a_dry_run_is_drawn_as_it_was_told(tmp_path, capsys):
    file, results = tmp_path / "run.pickle", tmp_path / "r.jsonl"
    flags = "--random_weights tiny --dry_run --cache_size 256 --prompt_tokens 240 --max_new_tokens 8 --kv_cache_quantization"
    assert status_of(generate.cli, [*flags.split(), "--memory_profile", file, "--write_result", results]) == 0
    (trace,) = plot_memory.read_traces(file)
    told = json.loads(results.read_text())
    assert trace.reserved.max() == round(told["peak_memory_gb"] * GB) and trace.peak_phase == told["peak_phase"]
    assert trace.source == "simulated a100-80" and not trace.categories[plot_memory.UNKNOWN].any()
    assert trace.categories[plot_memory.ROWS["weights"]][-1] == pytest.approx(told["memory_gb"]["weights"] * GB, rel=0.01)
    capsys.readouterr()
    status, out, err = run(plot_memory, capsys, file)
    assert status == 0 and not err and out == [f"{file}: {plot_memory.describe(trace)}", str(tmp_path / "run.png")]
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    status, out, err = run(plot_memory, capsys, file, file, "--labels", "a", "b", "--out", tmp_path / "x.png")
    assert status == 0 and len(out) == 3 and (tmp_path / "x.png").is_file()
    status, _, err = run(plot_results, capsys, results)
    assert status == 0 and not err and (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


class Call:
    """Pickled, it calls os.system where it is loaded."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_nothing_is_executed(tmp_path, capsys):
    mark = tmp_path / "mark"
    for value in (Call(f"touch '{mark}'"), snapshot([*EVENTS, Call(f"touch '{mark}'")]), snapshot([OrderedDict(EVENTS[0])])):
        status, out, err = run(plot_memory, capsys, write(tmp_path / "s", value))
        assert status == 2 and not out and len(err) == 1 and err[0].startswith("plot_memory.py: ") and "plain" in err[0]
    assert not mark.exists() and not (tmp_path / "s.png").exists()


BAD_EVENTS = (
    [{}], [1], ["alloc"], [EVENTS[1] | {"size": -1}], [EVENTS[1] | {"size": 2**70}], [EVENTS[1] | {"size": "1"}],
    [EVENTS[1] | {"addr": []}], [EVENTS[1] | {"category": {}}], [{"action": "alloc", "addr": 1}], 3,
)  # fmt: skip


def test_errors_are_one_line(tmp_path, capsys):
    good = write(tmp_path / "good", snapshot(EVENTS))
    damaged = [good.read_bytes()[:n] for n in (0, 1, 50, 300)] + [b"\x80\x04garbage", b"not a pickle\n", b"\x89PNG"]
    values = [None, 3, [], {}, {"segments": []}, snapshot(EVENTS, [{}]), snapshot(EVENTS, [3]), *map(snapshot, BAD_EVENTS)]
    cases = [[file] for file in (tmp_path, tmp_path / "nowhere")]
    for i, content in enumerate([*damaged, *map(pickle.dumps, values), pickle.dumps(snapshot([]))]):
        (tmp_path / f"bad{i}").write_bytes(content)
        cases.append([tmp_path / f"bad{i}"])
    cases += [[good, "--labels", "a", "b"], [good, "--out", good], [good, "--out", tmp_path / "no" / "x.png"],
              [good, "--out", tmp_path / "x.what"], [], [good, "--nonsense"]]  # fmt: skip
    before = sorted(tmp_path.iterdir())
    for case in cases:
        status, _, err = run(plot_memory, capsys, *case)
        assert status == 2 and len(err) == 1 and err[0].startswith("plot_memory.py: "), (case, err)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["plot_memory", "plot_results"])
def test_without_matplotlib(tmp_path, name):
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text("raise ImportError('no such thing')")
    command = [sys.executable, ROOT / "scripts" / f"{name}.py", tmp_path / "file"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"{name}.py: drawing needs the package matplotlib: {sys.executable} -m pip install matplotlib\n"


# --- results ---

ROW = {
    "model": "Llama-3.1-8B", "quantization": None, "kv_cache_quantization": None, "linear_causal_mask": False,
    "cache_size": 8192, "prompt_tokens": 6, "peak_memory_gb": 17.2649, "peak_memory_source": "simulated", "estimate": False,
    "precision": "bfloat16", "batch_size": 1, "device_name": "a100-80", "torch": "2.13.0", "commit": "abc",
    "prefill_chunk": 512,
}  # fmt: skip
KV = {"kv_cache_quantization": "int8"}
LINEAR = KV | {"linear_causal_mask": True}
INT4 = LINEAR | {"quantization": "int4wo-64", "cache_size": 131072, "prompt_tokens": 131000, "peak_memory_gb": 13.9}
LINES = [
    ROW | {"peak_memory_gb": 99},
    ROW | INT4,
    ROW | {"prompt_tokens": 8000, "peak_memory_gb": 17.3},
    ROW | KV | {"peak_memory_gb": 16.744, "estimate": True},
    ROW,  # replaces the first
    ROW | {"peak_memory_gb": 18.25, "peak_memory_source": "cuda", "device_name": "NVIDIA A100", "commit": "def"},
    ROW | LINEAR | {"model": "m", "precision": "float32", "batch_size": 2, "peak_memory_gb": 1, "cache_size": 300},
    ROW | {"model": "m", "peak_memory_gb": 0.5, "prompt_tokens": 9, "peak_memory_source": "rss", "device_name": "CPU"},
]
TABLE = """\
Peak GB of Llama-3.1-8B:

| context | mode | published | 6-token prompt (measured) | 6-token prompt (simulated) | context filled (simulated) |
| ---: | --- | ---: | ---: | ---: | ---: |
| 8,192 | normal | 17.86 | 18.25 | 17.26 | 17.30 |
| 8,192 | kv_quant | 17.52 |  | ≈ 16.74 |  |
| 131,072 | int4wo-64 + kv_quant + linear | 18.90 |  |  | 13.90 |

torch 2.13.0; measured on NVIDIA A100; simulated on a100-80; prefill chunk 512; commit abc, def; GB = 1e9 bytes; \
≈: an estimate, compiled code was simulated uncompiled; published: pytorch/ao pull request 738, one A100, 6-token prompt, \
int4wo-64 + kv_quant + linear compiled.

Peak GB of m:

| context | mode | 9-token prompt (host memory, measured) | 6-token prompt (simulated) |
| ---: | --- | ---: | ---: |
| 300 | float32 + kv_quant + linear + 2 rows |  | 1.00 |
| 8,192 | normal | 0.50 |  |

torch 2.13.0; host memory, measured on CPU; simulated on a100-80; prefill chunk 512; commit abc; GB = 1e9 bytes.
"""


def results_file(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_table(tmp_path, capsys):
    file = results_file(tmp_path / "r.jsonl", LINES)
    assert status_of(plot_results.cli, [file, "--markdown"]) == 0
    out, err = capsys.readouterr()
    assert out == TABLE and err == "" and [f.name for f in tmp_path.iterdir()] == ["r.jsonl"]
    status, out, _ = run(plot_results, capsys, file, "--markdown", "--out", tmp_path / "x.png")
    assert status == 0 and out == TABLE.splitlines() and (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_cards_of_one_kind_have_their_own_columns(tmp_path, capsys):
    file = results_file(tmp_path / "r.jsonl", [ROW, ROW | {"device_name": "h200", "prompt_tokens": 7, "peak_memory_gb": 18}])
    _, out, _ = run(plot_results, capsys, file, "--markdown")
    titles = "| context | mode | published | 6-token prompt (simulated on a100-80) | 7-token prompt (simulated on h200) |"
    assert out[2] == titles and out[4] == "| 8,192 | normal | 17.86 | 17.26 | 18.00 |"


def test_the_lines_of_the_picture(tmp_path):
    more = [ROW | {"cache_size": 65536, "peak_memory_gb": 29.04}, ROW | LINEAR | {"prompt_tokens": 8000}]
    results, warnings = plot_results.read_results(results_file(tmp_path / "r.jsonl", [*LINES, *more]))
    assert not warnings
    figure = plot_results.draw_figure(results)
    first, second = figure.axes
    assert first.get_title().startswith("Llama-3.1-8B") and second.get_title().startswith("m")
    drawn = {tuple(zip(*line.get_data())): line for line in first.lines}
    normal = drawn[(8192, 17.2649), (65536, 29.04)]
    assert normal.get_linestyle() == "--" and drawn[((8192, 17.3),)].get_linestyle() == "-"
    hollow = {at: line for at, line in drawn.items() if line.get_markerfacecolor() == "none"}
    points = [(8192, 17.86), (8192, 17.52), (8192, 17.47), (65536, 33.5), (131072, 18.9)]
    assert set(hollow) == {(p,) for p in points}
    assert hollow[((8192, 17.86),)].get_markeredgecolor() == normal.get_color()
    assert first.get_xticks().tolist() == [8192, 65536, 131072] and first.get_xscale() == first.get_yscale() == "linear"
    assert [t.get_text() for t in first.get_xticklabels()] == ["8k", "64k", "128k"]
    assert first.get_xlim()[0] == first.get_ylim()[0] == 0 and first.get_ylim()[1] > 33.5
    assert not [line for line in second.lines if line.get_markerfacecolor() == "none"]
    words = [t.get_text() for legend in figure.legends for t in legend.get_texts()]
    assert "int4wo-64 + kv_quant + linear" in words and any("pull request 738" in w for w in words)
    assert "6-token prompt (simulated), some an estimate" in words and "6-token prompt (measured)" in words


def test_damaged_and_failed_lines_are_named(tmp_path, capsys):
    file = tmp_path / "r.jsonl"
    changes = (
        {"peak_memory_gb": None}, {"peak_memory_gb": float("nan")}, {"peak_memory_gb": 10**400}, {"cache_size": "8"},
        {"prompt_tokens": True}, {"peak_memory_source": "x"}, {"peak_memory_source": []}, {"batch_size": None},
    )  # fmt: skip
    failed = {"date": "x", "command": "python generate.py", "error": "generate.py: too\nlarge", "status": 2}
    bad = [json.dumps(failed), '{"model": "m', "[1]", '"error"', "1", "{}", *(json.dumps(ROW | c) for c in changes)]
    file.write_text("\n".join([json.dumps(ROW), *bad, "", json.dumps(ROW | KV)]))
    status, out, err = run(plot_results, capsys, file, "--markdown")
    assert status == 1 and len(out) == 4 + 2 + 2
    assert [line.split(":")[1] for line in err] == [str(2 + i) for i in range(len(bad))]
    assert err[0] == f"{file}:2: a run that failed (status 2: too large), left out"
    assert all("left out" in line and line.startswith(f"{file}:") for line in err)
    assert run(plot_results, capsys, file)[0] == 1 and (tmp_path / "r.png").is_file()


def test_nothing_to_draw(tmp_path, capsys):
    empty = results_file(tmp_path / "r.jsonl", [])
    assert run(plot_results, capsys, empty) == (1, [], [f"{empty}: no results"])
    good = results_file(tmp_path / "g.jsonl", LINES)
    for case in ([tmp_path / "nowhere"], [tmp_path], [good, "--out", good], [good, "--out", tmp_path / "no" / "x"], []):
        status, out, err = run(plot_results, capsys, *case)
        assert status == 2 and not out and len(err) == 1 and err[0].startswith("plot_results.py: "), err
    assert sorted(f.name for f in tmp_path.iterdir()) == ["g.jsonl", "r.jsonl"]


def test_the_readme_shows_what_was_recorded(capsys):
    """The tables of the README are those of docs/memory.jsonl, and the headline is its last row."""
    readme, file = (ROOT / "README.md").read_text(), ROOT / "docs" / "memory.jsonl"
    assert plot_results.cli([str(file), "--markdown", "--context", "131072"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 12 and all(row in readme for row in rows)
    assert f"{rows[5].split('|')[-2].strip()} GB (simulated).**" in readme
