"""The scripts around generate.py: download, conversion, the sweep and its table."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers
from conftest import ROOT, make_model, random_prompt, status_of, write_tiny

from checkpoint import open_checkpoint
from generate import prefill
from quantize import load_model


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


download, convert, summarize = map(script, ("download", "convert_hf_checkpoint", "summarize"))


def bash(file: str, *arguments, **environment) -> tuple[int, str, str]:
    done = subprocess.run(
        ["bash", str(ROOT / file), *map(str, arguments)], capture_output=True, text=True, env=os.environ | environment
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory) -> Path:
    """A tiny Llama as transformers writes it, in bfloat16, with a tokenizer."""
    folder = tmp_path_factory.mktemp("hub") / "Tiny-Llama"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    os.rename(write_tiny(folder.parent / "ours") / "tokenizer.model", folder / "tokenizer.model")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder


# --- download ---

LLAMA31 = """.gitattributes LICENSE README.md config.json generation_config.json model-00001-of-00002.safetensors
    model-00002-of-00002.safetensors model.safetensors.index.json special_tokens_map.json tokenizer.json
    tokenizer_config.json original/consolidated.00.pth original/params.json original/tokenizer.model""".split()


class Hub(types.ModuleType):
    """In the place of huggingface_hub: a repository's files, or what it raises."""

    def __init__(self, files: list[str], fail: Exception | None = None, late: Exception | None = None):
        super().__init__("huggingface_hub")
        self.files, self.fail, self.late, self.calls = files, fail, late, []

    def model_info(self, repo, revision=None, files_metadata=False, token=None):
        self.calls.append(("info", repo, revision, token))
        if self.fail:
            raise self.fail
        siblings = [types.SimpleNamespace(rfilename=f, size=10) for f in self.files]
        return types.SimpleNamespace(sha="c0ffee", siblings=siblings)

    def snapshot_download(self, repo, *, revision, local_dir, allow_patterns, token):
        self.calls.append(("snapshot", repo, revision, token, allow_patterns))
        self.had = sorted(f.name for f in local_dir.iterdir())
        (local_dir / ".cache" / "huggingface").mkdir(parents=True, exist_ok=True)
        for i, file in enumerate(allow_patterns):
            if self.late and i == 2:
                raise self.late
            (local_dir / file).parent.mkdir(exist_ok=True)
            (local_dir / file).write_text("0123456789")


@pytest.fixture
def fetch(monkeypatch, capsys, tmp_path):
    """Runs download.py against a hub; returns its status and its lines on stderr."""

    def fetch(hub, *flags, repo="meta-llama/Llama-3.1-8B") -> tuple[int, list[str]]:
        monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
        monkeypatch.chdir(tmp_path)
        status = download.main([repo, *flags])
        out, err = capsys.readouterr()
        assert out == ""
        return status, err.splitlines()

    return fetch


def test_download_takes_what_is_needed_and_no_more(fetch, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub = Hub(LLAMA31)
    status, err = fetch(hub)
    want = [f for f in LLAMA31 if "/" not in f and f not in (".gitattributes", "LICENSE", "README.md")]
    assert status == 0 and "hf_secret" not in "".join(err)
    repo = "meta-llama/Llama-3.1-8B"
    assert hub.calls == [("info", repo, None, "hf_secret"), ("snapshot", repo, "c0ffee", "hf_secret", sorted(want))]
    folder = tmp_path / "checkpoints/meta-llama/Llama-3.1-8B"
    assert sorted(f.name for f in folder.iterdir()) == sorted(want)
    status, err = fetch(hub)
    assert status == 2 and len(err) == 1 and "there already" in err[0] and len(hub.calls) == 2


@pytest.mark.parametrize("files, flags, want", [
    (LLAMA31, ["--original"], "original/params.json original/consolidated.00.pth original/tokenizer.model "
     "tokenizer.json tokenizer_config.json generation_config.json special_tokens_map.json"),
    ("params.json consolidated.00.pth consolidated.01.pth tokenizer.model x.md".split(), ["--original"],
     "params.json consolidated.00.pth consolidated.01.pth tokenizer.model"),
    # weights that are there twice, in another format or another precision
    ("config.json model.safetensors pytorch_model.bin model.fp16.safetensors onnx/model.safetensors".split(), [],
     "config.json model.safetensors"),
    ("config.json model-1.safetensors consolidated.safetensors tokenizer.model".split(), [],
     "config.json model-1.safetensors tokenizer.model"),
    ("config.json pytorch_model-1.bin pytorch_model.bin.index.json training_args.bin chat_template.jinja".split(), [],
     "config.json pytorch_model-1.bin pytorch_model.bin.index.json chat_template.jinja"),
])  # fmt: skip
def test_download_chooses_one_format(fetch, files, flags, want):
    hub = Hub(files)
    assert fetch(hub, *flags)[0] == 0
    assert hub.calls[1][4] == sorted(want.split())


def error(name: str, *bases: type) -> Exception:
    return type(name, bases or (OSError,), {})("first line\nsecond line")


GATED = error("GatedRepoError", type("RepositoryNotFoundError", (OSError,), {}))
HUB_ERRORS = {
    "gated": (GATED, 2, "https://huggingface.co/meta-llama/Llama-3.1-8B"),
    "not found": (error("RepositoryNotFoundError"), 2, "not found"),
    "revision": (error("RevisionNotFoundError"), 2, "--revision"),
    "name": (error("HFValidationError", ValueError), 2, "first line"),
    "no network": (error("ConnectError", Exception), 1, "ConnectError: first line; run the same command again"),
    "server": (error("HfHubHTTPError"), 1, "HfHubHTTPError"),
}


@pytest.mark.parametrize("fail, want, word", HUB_ERRORS.values(), ids=HUB_ERRORS)
def test_download_errors_are_one_line(fetch, tmp_path, fail, want, word):
    status, err = fetch(Hub(LLAMA31, fail))
    assert status == want and len(err) == 1 and word in err[0] and not list(tmp_path.iterdir())


def test_download_without_the_library_or_the_weights(fetch):
    status, err = fetch(None)
    assert status == 2 and len(err) == 1 and "pip install huggingface_hub" in err[0]
    status, err = fetch(Hub(["config.json", "llama.gguf"]))
    assert status == 2 and len(err) == 1 and "model*.safetensors" in err[0]
    status, err = fetch(Hub(["original/params.json", "original/consolidated.00.pth"]))
    assert status == 2 and "--original" in err[0]
    for repo in ("llama", "../x", "a/b/c", "https://huggingface.co/a/b"):
        status, err = fetch(Hub(LLAMA31), repo=repo)
        assert status == 2 and len(err) == 1 and "ORGANISATION/NAME" in err[0]


def test_download_resumes(fetch, tmp_path):
    status, err = fetch(Hub(LLAMA31, late=error("ReadTimeout", Exception)))
    folder = tmp_path / "checkpoints/meta-llama/Llama-3.1-8B"
    assert status == 1 and len(err) == 2 and "run the same command again" in err[1] and not folder.exists()
    hub = Hub(LLAMA31)
    assert fetch(hub)[0] == 0 and "config.json" in hub.had and (folder / "tokenizer.json").is_file()


def test_download_trusts_files_alone(fetch, tmp_path):
    """Without a connection, the library returns the folder as it is, with a warning."""
    hub = Hub(LLAMA31)
    hub.snapshot_download = lambda *args, **more: None
    status, err = fetch(hub)
    assert status == 1 and "did not arrive" in err[-1] and not (tmp_path / "checkpoints/meta-llama/Llama-3.1-8B").exists()


# --- conversion ---


def run_convert(capsys, *flags) -> tuple[int, list[str]]:
    status = status_of(convert.cli, ["--checkpoint_path", *flags])
    out, err = capsys.readouterr()
    assert out == ""
    return status, err.splitlines()


def logits(folder, dtype: torch.dtype) -> torch.Tensor:
    model, _ = load_model(open_checkpoint(folder), torch.device("cpu"), dtype, None)
    model.setup_caches(1, 64)
    return prefill(model, random_prompt(40), 512)


def test_conversion_keeps_every_bit(capsys, hf_folder, tmp_path):
    status, err = run_convert(capsys, hf_folder, "--out", tmp_path / "new")
    assert status == 0 and err == [f"wrote {tmp_path / 'new'}"]
    assert sorted(f.name for f in tmp_path.iterdir()) == ["new"]
    wanted = {"config.json", "model.safetensors", "tokenizer.model", "generation_config.json", "chat_template.jinja"}
    assert {f.name for f in (tmp_path / "new").iterdir()} == wanted
    old, new = open_checkpoint(hf_folder), open_checkpoint(tmp_path / "new")
    assert json.loads((tmp_path / "new/config.json").read_text())["format"] and new.args == old.args
    assert {e.dtype for e in new.entries()} == {torch.bfloat16}
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(logits(hf_folder, dtype), logits(tmp_path / "new", dtype))
    reference = transformers.LlamaForCausalLM.from_pretrained(hf_folder, dtype=torch.float32)
    torch.testing.assert_close(logits(tmp_path / "new", torch.float32), reference(random_prompt(40)).logits[:, -1])


def test_conversion_of_a_bare_file_and_of_a_folder_without_tokenizer(capsys, tmp_path):
    (tmp_path / "tiny").mkdir()
    torch.save(make_model("tiny").state_dict(), tmp_path / "tiny" / "model.pth")
    status, err = run_convert(capsys, tmp_path / "tiny" / "model.pth")
    assert status == 0 and len(err) == 2 and "has no tokenizer" in err[0]
    assert torch.equal(logits(tmp_path / "tiny", torch.float32), logits(tmp_path / "tiny-flat", torch.float32))


def test_conversion_errors_are_one_line_and_leave_nothing(capsys, hf_folder, tmp_path, monkeypatch):
    for path, flags, word in (("nowhere", (), "nowhere"), (hf_folder, ("--out", hf_folder), "there already")):
        status, err = run_convert(capsys, path, *flags)
        assert status == 2 and len(err) == 1 and word in err[0]
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    status, err = run_convert(capsys, hf_folder, "--out", tmp_path / "new")
    assert status == 2 and err == [f"convert_hf_checkpoint.py: {tmp_path / 'new'}: disk full"]
    assert not list(tmp_path.iterdir())


def test_prepare_goes_from_the_hub_to_a_checkpoint(hf_folder, tmp_path):
    """Every step once; the second time, with no hub, nothing is left to do."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "huggingface_hub.py").write_text(f"""
import os, shutil, types
source = {str(hf_folder)!r}
def model_info(repo, **_):
    return types.SimpleNamespace(sha="x", siblings=[types.SimpleNamespace(rfilename=f, size=1) for f in os.listdir(source)])
def snapshot_download(repo, local_dir, allow_patterns, **_):
    for file in allow_patterns:
        shutil.copy(os.path.join(source, file), local_dir)
""")
    run = functools.partial(
        bash, "scripts/prepare.sh", "someone/Tiny", CHECKPOINTS=str(tmp_path), PYTHONPATH=str(tmp_path / "fake")
    )
    status, out, err = run()
    assert status == 0 and out == "" and err.count("wrote") == 2 and err.endswith(f"{tmp_path}/someone/Tiny-flat\n")
    assert torch.equal(logits(tmp_path / "someone/Tiny-flat", torch.float32), logits(hf_folder, torch.float32))
    (tmp_path / "fake" / "huggingface_hub.py").write_text("raise SystemExit(9)")
    status, _, err = run()
    assert status == 0 and err.count("\n") == 1
    assert bash("scripts/prepare.sh")[0] == 2


# --- the sweep and its table ---

ROW = {
    "model": "m", "quantization": None, "kv_cache_quantization": "int8", "linear_causal_mask": True, "cache_size": 8192,
    "prompt_tokens": 6, "prefill_tok_s": 100.04, "decode_tok_s": None, "decode_tok_s_sd": None, "model_gb": 0.25,
    "kv_cache_gb": 0.5, "peak_memory_gb": 1, "peak_memory_source": "rss", "precision": "bfloat16", "device": "cpu",
}  # fmt: skip
FAILED = {"date": "x", "command": "python generate.py --random_weights tiny --cache_size 64 --kv_cache_quantization "
          "--no-linear_causal_mask --quantization int8wo", "error": "generate.py: a|b", "status": 2}  # fmt: skip


def summary(capsys, file: Path, *flags) -> tuple[int, list[str], list[str]]:
    status = summarize.main([str(file), *flags])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err.splitlines()


def test_the_table(capsys, tmp_path):
    file = tmp_path / "r.jsonl"
    more = ROW | {"decode_tok_s": 12.34, "decode_tok_s_sd": 0.5, "quantization": "int4wo-64", "precision": "float32"}
    file.write_text("".join(json.dumps(r) + "\n" for r in (ROW, more, FAILED)) + "\n")
    status, lines, err = summary(capsys, file)
    assert status == 0 and not err and lines[0] == "device cpu. GB = 1e9 bytes."
    titles, rule, *rows = [[cell.strip() for cell in line.split("  ") if cell] for line in lines[2:]]
    numbers = ["model GB", "KV GB", "peak GB"]
    assert titles == ["model", "weights", "kv cache", "mask", "cache_size", "prompt", "prefill tok/s", "decode tok/s",
                      *numbers, "precision", "error"]  # fmt: skip
    first = ["m", "bfloat16", "int8", "linear", "8,192", "6", "100.0", "n/a", "0.250", "0.500", "1.000 rss", "bfloat16"]
    assert rows[0] == first
    assert rows[1][1] == "int4wo-64" and rows[1][7] == "12.3 ± 0.5"
    assert rows[2] == ["tiny", "int8wo", "int8", "square", "64", *"-" * 7, "status 2: a|b"]
    ends = {lines[i].index(end) + len(end) for i, end in ((2, "size"), (4, "8,192"), (6, "64"))}
    assert ends == {lines[2].index("  prompt")}
    status, lines, _ = summary(capsys, file, "--markdown")
    assert status == 0 and all(line[:2] == "| " and line[-2:] == " |" for line in lines[2:]) and r"a\|b" in lines[-1]
    assert len({line.replace(r"\|", "").count("|") for line in lines[2:]}) == 1 and "---:" in lines[3]


def test_damaged_lines_are_named_and_left_out(capsys, tmp_path):
    file = tmp_path / "r.jsonl"
    bad = [b'{"model": "m", "quanti', b"\xff\xfe", b"[1]", b'"error"', b"{}", json.dumps(ROW | {"model_gb": "x"}).encode(),
           json.dumps(FAILED | {"command": '"'}).encode(), json.dumps(FAILED | {"error": None}).encode()]  # fmt: skip
    good = json.dumps(ROW).encode()
    file.write_bytes(b"\n".join([good, *bad, b"", good]))
    status, lines, err = summary(capsys, file)
    assert status == 1 and len(lines) == 2 + 2 + 2
    assert [int(line.split(":")[1]) for line in err] == list(range(2, 2 + len(bad))) and "left out" in err[0]
    file.write_text("")
    assert summary(capsys, file)[0] == 1
    status, lines, err = summary(capsys, tmp_path / "nowhere")
    assert status == 2 and not lines and len(err) == 1


def sweep(file: Path, **environment) -> tuple[int, str, str]:
    small = {"MODEL": "tiny", "DEVICE": "cpu", "NUM_SAMPLES": "1", "MAX_NEW_TOKENS": "4", "OUT": str(file)}
    return bash("benchmarks.sh", **small | environment)


def test_a_sweep_goes_on_after_a_failure(tmp_path):
    file = tmp_path / "new folder" / "r.jsonl"
    grid = {"CONTEXTS": "512 256", "MODES": "kv_quant+linear", "SCHEMES": "none int4wo-256", "FLAGS": "--seed 3"}
    status, out, err = sweep(file, **grid)
    results = [json.loads(line) for line in file.read_text().splitlines()]
    assert status == 0 and "3 cells, 1 failed" in err
    done = [r for r in results if "error" not in r]
    assert [(r["cache_size"], r["kv_cache_quantization"], r["linear_causal_mask"]) for r in done] == [
        (512, "int8", True), (256, "int8", True),
    ]  # fmt: skip
    assert all(r["model"] == "tiny" and r["new_tokens"] == 4 and "--seed 3" in r["command"] for r in done)
    (failed,) = [r for r in results if "error" in r]
    assert set(failed) == {"date", "command", "error", "status"} and failed["status"] == 2
    assert failed["error"] in err.splitlines() and "int4wo-256" in failed["error"]
    assert failed["command"].startswith("python generate.py ") and "--cache_size 256" in failed["command"]
    rows = out.splitlines()[4:]
    assert len(rows) == 3 and "int4wo-256" in rows[-1] and "status 2: --quantization int4wo-256" in rows[-1]


def test_a_sweep_where_all_fails(tmp_path):
    grid = {"MODEL": "nobody/Meta-Nothing-Instruct", "CONTEXTS": "256", "MODES": "kv_quant", "SCHEMES": "int8wo"}
    status, out, err = sweep(tmp_path / "r.jsonl", **grid)
    assert status == 1 and "random weights of Nothing" in err and "1 cells, 1 failed" in err
    row = "Nothing  int8wo   int8      square         256"
    assert out.splitlines()[-1].startswith(row) and "status 2: --random_weights: unknown model" in out
    status, out, err = sweep(tmp_path / "none.jsonl", MODES="fast")
    assert status == 2 and out == "" and "fast" in err and not (tmp_path / "none.jsonl").exists()


def test_the_memory_sweep(tmp_path):
    """Every mode with a short prompt and with the context filled; the table says what was simulated."""
    file = tmp_path / "m.jsonl"
    small = {"MODEL": "tiny", "DEVICE": "cpu", "OUT": str(file), "CONTEXTS": "256", "MAX_NEW_TOKENS": "8"}
    modes = "normal int4wo-64+kv_quant+linear"
    status, out, err = bash("benchmarks.sh", "memory", **small, MODES=modes)
    results = [json.loads(line) for line in file.read_text().splitlines()]
    assert status == 0 and "4 cells, 0 failed" in err and out.count("(simulated)") == 2
    assert [(r["prompt_tokens"], r["quantization"]) for r in results] == [
        (6, None), (248, None), (6, "int4wo-64"), (248, "int4wo-64"),
    ]  # fmt: skip
    assert all(r["peak_memory_source"] == "simulated" and "--dry_run" in r["command"] for r in results)
    assert file.with_suffix(".png").stat().st_size > 1000
    status, out, err = bash("benchmarks.sh", "speeed")
    assert status == 1 and "usage" in err
