"""scripts/gpu_check.py on the CPU: its table, its exit status, and that it sees faults."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"

# Runs main with the card hidden, so that the test is the same everywhere; each fault is put in before it.
RUN = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import torch
torch.cuda.is_available = lambda: False
import attention, gpu_check
{fault}
sys.exit(gpu_check.main(sys.argv[1:]))
"""


def run(*argv: str, fault: str = "") -> tuple[int, str, dict[str, list[str]]]:
    """Exit status, everything printed, and the table's rows: part -> [verdict, key figures]."""
    command = [sys.executable, "-c", RUN.format(fault=fault), str(SCRIPTS), *argv]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    # torch's profiler, which records memory on a CPU, tells of itself
    errors = [line for line in result.stderr.splitlines() if not line.startswith("USDT:")]
    assert not errors, errors
    rows = [[cell.strip() for cell in line.split(" | ")] for line in result.stdout.splitlines() if line.count(" | ") == 2]
    assert rows[0] == ["part", "verdict", "key figures"]
    return result.returncode, result.stdout, {row[0]: row[1:] for row in rows[1:]}


def test_parts_pass_on_the_cpu_and_their_figures_are_written(tmp_path):
    file = tmp_path / "result.jsonl"
    status, text, table = run("--only", "repeat", "rates", "chunks", "--json", str(file))
    assert status == 0, text
    assert {part: row[0] for part, row in table.items()} == {"repeat": "ok", "rates": "ok", "chunks": "ok"}
    assert "no CUDA here: small sizes on the CPU, nothing below is a statement about a card" in text
    assert "0 of 48 chunkings differ" in table["chunks"][1]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["part"] for line in lines] == ["repeat", "rates", "chunks"]
    assert all(line["figures"] and line["verdict"] == "ok" and line["environment"]["torch"] for line in lines)


INT4 = "int4wo-64 + kv_quant + linear"
ROWS = ["normal, 6 tokens", "kv_quant, 6 tokens", "kv_quant + linear, 6 tokens", f"{INT4}, 6 tokens", f"{INT4}, 192 tokens"]


def test_memory_on_the_cpu_compares_bytes_and_writes_both_snapshots(tmp_path):
    status, text, table = run("--only", "memory", "--json", str(tmp_path / "result.jsonl"), "--out", str(tmp_path / "new"))
    assert (status, table["memory"][0]) == (0, "ok"), text
    assert "memory: bytes of tensors on the CPU, simulated and real: no statement about a card" in text
    assert "filled: 192 of 256 slots; 0 of 5 simulated commands differ from the CPU's tensors" in table["memory"][1]
    (line,) = map(json.loads, (tmp_path / "result.jsonl").read_text().splitlines())
    figures = line["figures"]
    assert list(figures) == ["check before a run", *ROWS[:4], "recorded snapshot", ROWS[4]]
    kept = {row: figures[row]["kept_bytes"] for row in ROWS}
    assert all(not figures[row]["simulated_and_kept_bytes_that_differ"] and figures[row]["simulated_in_s"] for row in ROWS)
    assert kept[ROWS[0]]["mask"] == kept[ROWS[1]]["mask"] == 256 * 256
    assert kept[ROWS[0]]["KV cache"] == 2 * 2 * 2 * 256 * 16 * 4  # layers, K and V, heads, slots, head dim, float32
    assert kept[ROWS[2]].keys() == {"weights", "KV cache", "tables", "scratch"}
    assert figures["recorded snapshot"]["tensors"] == figures["recorded snapshot"]["snapshot"] == kept[ROWS[3]]
    snapshots = [pickle.loads((tmp_path / "new" / f"{name}.pickle").read_bytes()) for name in ("measured", "simulated")]
    assert [s["source"] for s in snapshots] == ["cpu", "simulated a100-80"]


def test_a_wrong_simulation_of_the_memory_fails(tmp_path):
    """One that takes a cache of twice the size."""
    fault = """
import predict
simulate = predict.simulate
def wrong(rehearse, args, *more):
    return simulate(rehearse, predict.with_flags(args, cache_size=2 * args.cache_size), *more)
predict.simulate = wrong
"""
    status, text, table = run("--only", "memory", fault=fault)
    assert (status, table["memory"][0]) == (1, "FAIL")
    assert "memory: FAIL normal, 6 tokens:" in text
    assert "differ {'KV cache': [262144, 131072], 'mask': [262144, 65536], 'tables':" in text
    assert "5 of 5 simulated commands differ" in table["memory"][1]


# A card that is none: it reports the peaks that were simulated, divided by a factor, above what was reserved before.
CARD = """
import predict
class Card(gpu_check.Place):
    def pick(self, on_card, on_cpu):
        return on_cpu
gpu_check.Place = lambda device, card, out: Card(device, True, out)
workspace, before, last, simulate = 32 * 2**20, 100 * 10**6, [], predict.simulate
factors = iter({factors})
def simulated(*args):
    last[:] = simulate(*args), next(factors)
    if last[1] is None:
        last[1] = 1
        raise RuntimeError("no simulation")
    return last[0]
predict.simulate = simulated
cuda, beyond = torch.cuda, before - workspace
cuda.memory_reserved = cuda.memory_allocated = lambda device: before
cuda.max_memory_reserved = lambda device: round(last[0].reserved / last[1]) + beyond
cuda.max_memory_allocated = lambda device: last[0].card.allocator.peak_allocated + beyond
cuda.mem_get_info = lambda device: ({free} - before, 10**12)
cuda.get_device_name, cuda.get_device_capability = lambda device: "none", lambda device: (9, 0)
def chunks(part, *more):
    part.budget_s = 0
    return 2
gpu_check.affordable_chunks = chunks
"""


def test_peaks_beyond_the_limit_fail_and_what_cannot_be_simulated_is_measured():
    fault = CARD.replace("{factors}", "(1.01, 1.03, None, 0.99, 1)").replace("{free}", "10**9")
    status, text, table = run("--only", "memory", fault=fault)
    assert (status, table["memory"][0]) == (1, "FAIL")
    lines = {line.split(":")[1].strip(): line for line in text.splitlines() if line.startswith("memory: ")}
    assert [what for what in lines if what.startswith("FAIL")] == [f"FAIL {ROWS[1]}", f"FAIL simulation of {ROWS[2]}"]
    assert "off percent 1, limit percent 2," in lines[ROWS[0]]
    assert "off percent 3, limit percent 2," in lines[f"FAIL {ROWS[1]}"]
    assert "where they differ {'fragmentation': [" in lines[ROWS[0]]
    assert "no simulation" in lines[f"FAIL simulation of {ROWS[2]}"]
    assert "measured MB" in lines[f"{ROWS[2]}, measured alone"]
    assert "off percent -1, limit percent 2," in lines[ROWS[3]]
    assert f"memory: {INT4}, 128 tokens: stopped after warm-up" in text
    assert f"{ROWS[0]}: 0.06 GB, simulated +1.0 %" in table["memory"][1]


def test_rows_that_do_not_fit_the_card_are_skipped():
    status, text, table = run("--only", "memory", fault=CARD.replace("{factors}", "[1] * 5").replace("{free}", "10**7"))
    assert (status, table["memory"][0]) == (0, "ok"), text
    assert all(f"memory: {row}: skipped, 0.06 GB predicted and 0.01 GB free" in text for row in ROWS[:4])
    assert "no row with its context filled: no such model" in table["memory"][1]


def test_faults_are_seen_and_the_other_parts_still_run():
    """One part raises; an int8 cache forgets to rotate V back: its lines fail, those of the plain cache do not."""
    fault = 'gpu_check.PARTS["repeat"] = (lambda part, place: [][0], 5)\n'
    fault += "attention.Int8Cache.finish = lambda self, out, spare, constants: out"
    status, text, table = run("--only", "repeat", "operator", "rates", fault=fault)
    assert status == 1
    assert {part: row[0] for part, row in table.items()} == {"repeat": "FAIL", "operator": "FAIL", "rates": "ok"}
    assert "IndexError: list index out of range" in table["repeat"][1]
    assert "repeat: FAIL IndexError" in text
    assert "operator: FAIL float32 int8 H/K 32/8 D 128" in text
    assert "operator: float32 plain H/K 32/8 D 128" in text
