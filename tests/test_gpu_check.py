"""scripts/gpu_check.py on the CPU: its table, its exit status, and that it sees faults."""

import json
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
    assert not result.stderr, result.stderr
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
