"""The house rules of the repository: who imports whom, how long files are, what main is."""

import ast
import re

from conftest import ROOT

MAY_IMPORT = {
    "tokenizer": set(), "memory": set(), "cli": {"tokenizer"}, "attention": set(), "model": {"attention"},
    "snapshot": {"memory"}, "measure": {"model", "attention"}, "inputs": {"model", "tokenizer"},
    "entries": {"model"},
    "gguf_file": {"entries", "model", "tokenizer"}, "checkpoint": {"entries", "model", "gguf_file"},
    "quantize": {"attention", "model", "entries", "checkpoint", "cli"},
    "predict": {"attention", "model", "entries", "checkpoint", "quantize", "memory", "measure"},
    "generate": {
        "attention", "model", "entries", "checkpoint", "quantize", "predict", "memory", "snapshot", "measure", "inputs",
        "tokenizer", "cli",
    },
}  # fmt: skip


def imported(path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names


def length(path) -> int:
    return sum(bool(line.strip()) for line in path.read_text().splitlines())


def test_imports_point_one_way():
    modules = {p.stem: imported(p) for p in ROOT.glob("*.py")}
    assert set(modules) == set(MAY_IMPORT)
    for name, names in modules.items():
        assert names & set(modules) <= MAY_IMPORT[name], name
    assert "torch" not in modules["tokenizer"]
    scripts = {p.stem for p in (ROOT / "scripts").glob("*.py")}
    assert not [n for n, names in modules.items() if names & scripts], "a script is imported"


def test_files_can_be_read_in_an_evening():
    lengths = {p.name: length(p) for p in ROOT.glob("*.py")}
    assert max(lengths.values()) <= 450, lengths
    assert lengths["model.py"] + lengths["attention.py"] < 650 and sum(lengths.values()) < 3700, lengths


def test_main_is_a_paragraph():
    tree = ast.parse((ROOT / "generate.py").read_text())
    (main,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main"]
    assert main.end_lineno - main.lineno < 40


def test_importing_prints_and_changes_nothing():
    """Module level holds definitions only, and the operator's registration."""
    for path in ROOT.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                assert re.match(r"_library\.|torch\.library\.", ast.unparse(node.value)), (path.name, node.lineno)
            assert not isinstance(node, ast.For | ast.While | ast.Global), (path.name, node.lineno)
