"""The command line: what goes to stdout and stderr, limits, errors of one line, recorded results."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, needs_inductor, status_of, write_tiny
from safetensors.torch import load_file, save_file

import generate
import measure
from attention import KV_CACHES
from checkpoint import open_checkpoint, random_model
from memory import Watch
from model import ModelArgs
from tokenizer import load_tokenizer

FIELDS = """date commit command model quantization kv_cache_quantization linear_causal_mask cache_size prefill_chunk
    prompt_tokens new_tokens ttft_s prefill_tok_s decode_tok_s decode_tok_s_sd num_samples model_gb kv_cache_gb
    peak_memory_gb peak_memory_source device device_name precision compile compile_s torch threads""".split()


def run(capsys, *argv: str) -> tuple[int, str, str]:
    """Status, stdout and stderr of `python generate.py ...`, in this process."""
    capsys.readouterr()
    return (status_of(generate.cli, argv), *capsys.readouterr())


def process(*argv, **more) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "generate.py", *map(str, argv)], cwd=ROOT, capture_output=True, **more)


@pytest.fixture
def tiny(tiny_checkpoint):
    """Flags that every run on the tiny checkpoint needs."""
    return "--checkpoint_path", tiny_checkpoint, "--precision", "float32", "--temperature", "0"


# --- output ---


def test_stdout_has_the_continuation_alone(capsys, tiny):
    status, out, err = run(capsys, *tiny, "--prompt", "abc", "--max_new_tokens", 9, "--ignore_eos")
    assert status == 0 and out.endswith("\n") and "abc" not in out
    assert "4 prompt tokens" in err and "9 new tokens" in err  # BOS + 3 bytes


@pytest.mark.parametrize("linear", ("--linear_causal_mask", "--no-linear_causal_mask"))
@pytest.mark.parametrize("kind", KV_CACHES)
def test_every_number_of_new_tokens(capsys, kind, linear):
    """transformers#28621, torchchat#859: 0 tokens, and one too few or too many. n tokens are the first n of more."""
    flags = ["--random_weights", "tiny", "--prompt_tokens", 20, linear]
    flags += () if kind == "plain" else ("--kv_cache_quantization", kind)
    ids = run(capsys, *flags, "--max_new_tokens", 9)[1].split()
    assert len(ids) == 9
    for n in (0, 1, 2, 3, 5, 7):
        status, out, err = run(capsys, *flags, "--max_new_tokens", n)
        assert status == 0 and out.split() == ids[:n] and out.endswith("\n")
        assert f"{n} new tokens" in err and "first token after 0." in err
        assert ("decode n/a" in err) == (n < 2) and "inf" not in err


def test_a_stop_token_is_neither_shown_nor_counted(capsys):
    """textgen-webui#5885: any of several ids stops."""
    _, out, _ = run(capsys, "--random_weights", "tiny", "--max_new_tokens", 9, "--temperature", 0)
    ids = list(map(int, out.split()))
    for stop in (ids[4], ids[0]):
        model = random_model(ModelArgs.from_name("tiny"), torch.device("cpu"), torch.bfloat16)
        model.setup_caches(1, 30)
        args = generate.build_parser().parse_args([*TINY, "--max_new_tokens", "9"])
        prompt = torch.tensor([generate.prompt_ids(args, model.args, None)])
        stop_ids = frozenset({stop, 100000})
        s = generate.run_sample(
            model, prompt, args, generate.Sampling(0), generate.Steps(), stop_ids, generate.Printer(None, 1), Watch()
        )
        n = ids.index(stop)
        assert s.rows == [ids[:n]] and s.new_tokens == n and s.ttft_s > 0
        assert (s.decode_tok_s is None) == (n < 2)


def test_batch_rows_are_printed_one_after_another(capsys, tiny):
    flags = *tiny, "--prompt", "abc", "--ignore_eos", "--max_new_tokens", 6
    _, one, _ = run(capsys, *flags)
    status, three, err = run(capsys, *flags, "--batch_size", 3)
    assert status == 0 and "18 new tokens" in err
    assert three == 3 * one


def test_streamed_text_is_whole_characters(tiny_checkpoint):
    """TensorRT-LLM#2595: joined stream equals the decode of all ids; the printer adds nothing."""
    tokenizer = load_tokenizer(tiny_checkpoint)
    ids = list("a\u6f22\U0001f600\n".encode()) + [0xF0, 0x9F]
    shown = []
    printer = generate.Printer(tokenizer, 1)
    generate_emit, generate.emit = generate.emit, shown.append
    try:
        for id in ids:
            printer.push(id)
        printer.finish([ids])
    finally:
        generate.emit = generate_emit
    assert "".join(shown) == "a\u6f22\U0001f600\n\ufffd\n"
    assert "\ufffd" not in "".join(shown[: len(ids)])


# --- prompts ---


def test_prompts_are_literal(capsys, tiny, tmp_path, monkeypatch):
    """llamafile#58: backslash-n stays two characters; a file and stdin carry real newlines, byte for byte."""
    seen = []
    encode = generate.Tokenizer.encode
    monkeypatch.setattr(generate.Tokenizer, "encode", lambda self, text: seen.append(text) or encode(self, text))
    file = tmp_path / "p"
    file.write_bytes("\ufeffa\r\nb \n\n".encode())
    run(capsys, *tiny, "--prompt", r"a\nb", "--max_new_tokens", 1)
    run(capsys, *tiny, "--prompt_file", file, "--max_new_tokens", 1)
    assert seen == [r"a\nb", "\ufeffa\r\nb \n\n"]
    got = process(*tiny, "--prompt_file", "-", "--max_new_tokens", 1, input=file.read_bytes())
    assert got.returncode == 0 and b"11 prompt tokens" in got.stderr  # BOS, 3 bytes of U+FEFF, 7 more


def test_chat_uses_the_template(capsys, tiny):
    status, _, err = run(capsys, *tiny, "--chat", "--system", "S", "--prompt", "Hi", "--max_new_tokens", 1)
    # BOS; 3 headers: start, role, end, 2 newlines; 2 messages and their ends
    want = 1 + (4 + len("system")) + 1 + 1 + (4 + len("user")) + 2 + 1 + (4 + len("assistant"))
    assert status == 0 and f"{want} prompt tokens" in err


def test_a_prompt_of_one_token(capsys, tiny):
    status, _, err = run(capsys, *tiny, "--prompt", "", "--max_new_tokens", 3)
    assert status == 0 and "1 prompt tokens" in err


def test_prompt_tokens_are_varied_text(tiny_checkpoint):
    tokenizer = load_tokenizer(tiny_checkpoint)
    args = generate.build_parser().parse_args(["--prompt_tokens", "200"])
    ids = generate.prompt_ids(args, open_checkpoint(tiny_checkpoint).args, tokenizer)
    assert len(ids) == 200 and len(set(ids)) > 100 and max(ids) < 256
    assert ids == generate.prompt_ids(args, open_checkpoint(tiny_checkpoint).args, tokenizer)


# --- limits ---


def test_a_prompt_that_fills_the_context(capsys):
    status, out, _ = run(capsys, "--random_weights", "tiny", "--prompt_tokens", 255)
    assert status == 0 and len(out.split()) == 1
    status, out, err = run(capsys, "--random_weights", "tiny", "--prompt_tokens", 256, "--max_new_tokens", 0)
    assert status == 0 and out == "\n" and "note" not in err


def test_too_many_new_tokens_stop_at_the_context_with_a_note(capsys):
    """litgpt#1932"""
    status, out, err = run(capsys, "--random_weights", "tiny", "--prompt_tokens", 250, "--max_new_tokens", 50)
    assert status == 0 and len(out.split()) == 6 and "--max_new_tokens 50 stops at 6" in err and "256" in err


def test_a_short_then_a_long_prompt_in_one_process(capsys):
    """gpt-fast#53, #69: the second, longer prompt met the first one's caches, and a device-side assert."""
    for n in (10, 40, 10):
        status, out, _ = run(capsys, "--random_weights", "tiny", "--prompt_tokens", n, "--max_new_tokens", 5)
        assert status == 0 and len(out.split()) == 5


TINY = ["--random_weights", "tiny"]
ERRORS = {
    "cache too small": ([*TINY, "--prompt_tokens", "20", "--max_new_tokens", "10", "--cache_size", "24"],
                        ["--cache_size 24", "20", "10", "30"]),
    "cache beyond model": ([*TINY, "--prompt_tokens", "250", "--max_new_tokens", "10", "--cache_size", "512"],
                           ["256", "260", "--max_new_tokens 6"]),
    "prompt beyond model": ([*TINY, "--prompt_tokens", "257"], ["257", "256"]),
    "no memory": ([*TINY, "--cache_size", "2000000000"], ["2000000000 slots", "GB", "--cache_size"]),
    "no memory for weights": (["--random_weights", "Llama-3.1-405B"], ["random weights", "811.8 GB"]),
    "no memory for the mask": ([*TINY, "--cache_size", "10000000", "--no-linear_causal_mask"], ["GB"]),
    "cache 0": ([*TINY, "--cache_size", "0"], ["--cache_size"]),
    "chunk 0": ([*TINY, "--prefill_chunk", "0"], ["--prefill_chunk"]),
    "chunk text": ([*TINY, "--prefill_chunk", "many"], ["--prefill_chunk", "many"]),
    "negative temperature": ([*TINY, "--temperature", "-1"], ["--temperature", "-1"]),
    "temperature nan": ([*TINY, "--temperature", "nan"], ["--temperature", "nan"]),
    "top_p": ([*TINY, "--top_p", "1.5"], ["--top_p"]),
    "negative new": ([*TINY, "--max_new_tokens", "-1"], ["--max_new_tokens"]),
    "unknown model": (["--random_weights", "llama-8b"], ["llama-8b", "Llama-3.1-8B"]),
    "unknown kind": ([*TINY, "--kv_cache_quantization", "int3"], ["int3", "int8"]),
    "unknown precision": ([*TINY, "--precision", "int8"], ["--precision", "bfloat16"]),
    "unknown flag": ([*TINY, "--frobnicate"], ["--frobnicate"]),
    "random with prompt": ([*TINY, "--prompt", "x"], ["--prompt_tokens"]),
    "random with chat": ([*TINY, "--chat"], ["--prompt_tokens"]),
    "random with checkpoint": ([*TINY, "--checkpoint_path", "x"], ["--checkpoint_path"]),
    "two prompts": (["--prompt", "x", "--prompt_tokens", "3"], ["--prompt_tokens", "--prompt"]),
    "no checkpoint": (["--checkpoint_path", "/nowhere/at/all"], ["/nowhere/at/all", "quickstart.sh"]),
    "no prompt file": (["--prompt_file", "/nowhere/at/all"], ["--prompt_file /nowhere/at/all"]),
    "too many prompt tokens": ([*TINY, "--prompt_tokens", "2000000000"], ["--prompt_tokens 2000000000", "256"]),
    "too many slots": ([*TINY, "--batch_size", "2147483647", "--cache_size", "2147483647"], ["--cache_size"]),
    "long path": (["--checkpoint_path", "x" * 5000], ["--checkpoint_path"]),
    "device": ([*TINY, "--device", "gpu"], ["--device gpu"]),
    "result folder": ([*TINY, "--write_result", "/nowhere/at/all"], ["--write_result"]),
    "not built": (["--interactive"], ["--interactive is not built yet"]),
    "unknown scheme": ([*TINY, "--quantization", "int4wo-16"], ["int4wo-16", "int4wo-64"]),
    "scheme that fits nothing": (["--random_weights", "tiny-odd", "--quantization", "int4wo-256"],
                                 ["96 is no multiple of 256"]),
    "keep_head alone": ([*TINY, "--keep_head"], ["--quantization"]),
    "not built either": (["--interactive=1"], ["--interactive is not built yet"]),
}  # fmt: skip


def check_error(status, out, err, words):
    assert status == 2 and out == ""
    assert err.count("\n") == 1 and err.endswith("\n") and "Traceback" not in err and "usage" not in err
    for word in words:
        assert word in err, (word, err)


@pytest.mark.parametrize("argv, words", ERRORS.values(), ids=ERRORS)
def test_bad_command_lines_are_one_line_and_status_2(capsys, argv, words, tiny_checkpoint):
    if "--random_weights" not in argv and "--checkpoint_path" not in argv:
        argv = ["--checkpoint_path", str(tiny_checkpoint), *argv]
    check_error(*run(capsys, *argv), words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the message for machines without CUDA")
def test_cuda_without_cuda(capsys):
    check_error(*run(capsys, "--random_weights", "tiny", "--device", "cuda"), ["--device cpu"])


def test_compiling_where_it_cannot_work_is_refused(capsys, monkeypatch):
    """Inductor fails late, in hundreds of lines."""
    monkeypatch.setattr(torch, "__file__", "/a folder/torch/__init__.py")
    check_error(*run(capsys, *TINY, "--compile"), ["a path with a space"])
    monkeypatch.setattr(measure.shutil, "which", lambda name: None)
    check_error(*run(capsys, *TINY, "--compile_prefill"), ["C++ compiler"])


def test_system_needs_chat_and_ids_are_no_chat(capsys, tiny):
    check_error(*run(capsys, *tiny, "--system", "x"), ["--chat"])
    check_error(*run(capsys, *tiny, "--chat", "--prompt_tokens", 3), ["--prompt_tokens", "--chat"])


def test_prompt_files_that_are_no_text(capsys, tiny, tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    check_error(*run(capsys, *tiny, "--prompt_file", tmp_path / "latin"), ["not UTF-8 at byte 3"])
    check_error(*run(capsys, *tiny, "--prompt_file", tmp_path), ["--prompt_file"])


def damage(folder, what: str) -> None:
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    if what == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif what == "empty":
        weights.write_bytes(b"")
    elif what == "text":
        weights.write_bytes(b"not a tensor file at all, but long enough to hold a header length")
    elif what == "huge header":
        weights.write_bytes((1 << 62).to_bytes(8, "little") + weights.read_bytes()[8:])
    elif what == "no weights":
        weights.unlink()
    elif what == "missing tensor":
        del tensors["layers.1.feed_forward.w2.weight"]
        save_file(tensors, weights)
    elif what == "extra tensor":
        save_file(tensors | {"layers.9.x": torch.zeros(1)}, weights)
    elif what == "twice":
        save_file({"norm.weight": tensors["norm.weight"]}, folder / "model-2.safetensors")
    elif what == "shape":
        save_file(tensors | {"norm.weight": torch.ones(65)}, weights)
    elif what == "dtype":
        save_file(tensors | {"norm.weight": torch.ones(64, dtype=torch.int32)}, weights)
    elif what == "no config":
        (folder / "config.json").unlink()
    elif what == "config text":
        (folder / "config.json").write_text("{")
    elif what == "config list":
        (folder / "config.json").write_text("[]")
    elif what == "config field":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"window": 3}))
    elif what == "config value":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"n_layer": "two"}))
    elif what == "config scaling":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"rope_scaling": {"factor": "x"}}))
    elif what == "hugging face":
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    elif what == "no tokenizer":
        (folder / "tokenizer.model").unlink()
    elif what == "tokenizer empty":
        (folder / "tokenizer.model").write_bytes(b"")


DAMAGES = {
    "truncated": "model.safetensors", "empty": "model.safetensors", "text": "model.safetensors", "huge header": "damaged",
    "no weights": "no model*.safetensors", "missing tensor": "layers.1.feed_forward.w2.weight", "extra tensor": "layers.9.x",
    "twice": "twice", "shape": "[65]", "dtype": "I32", "no config": "config.json", "config text": "config.json",
    "config list": "config.json", "config field": "window", "config value": "n_layer", "config scaling": "rope_scaling",
    "hugging face": "Hugging Face", "no tokenizer": "no tokenizer", "tokenizer empty": "tokenizer.model",
}  # fmt: skip


@pytest.mark.parametrize("what, word", DAMAGES.items(), ids=DAMAGES)
def test_damaged_checkpoints_are_one_line_and_status_2(capsys, tmp_path, what, word):
    damage(write_tiny(tmp_path / "t"), what)
    check_error(*run(capsys, "--checkpoint_path", tmp_path / "t", "--prompt", "x", "--max_new_tokens", 2), [word])


def test_weights_that_are_no_numbers_are_refused(capsys, tmp_path):
    weights = load_file(write_tiny(tmp_path / "t") / "model.safetensors")
    weights["layers.0.attention.wqkv.weight"][0, 0] = float("nan")
    save_file(weights, tmp_path / "t" / "model.safetensors")
    check_error(*run(capsys, "--checkpoint_path", tmp_path / "t", "--prompt", "x"), ["not finite"])


def test_a_pipe_as_result_file_does_not_hang(capsys, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    check_error(*run(capsys, *TINY, "--write_result", tmp_path / "fifo"), ["--write_result"])


def test_a_refused_run_leaves_no_result_file(capsys, tmp_path):
    check_error(*run(capsys, *TINY, "--cache_size", 3, "--write_result", tmp_path / "r"), ["--cache_size"])
    assert not (tmp_path / "r").exists()


def test_an_empty_prompt_without_bos_is_refused(capsys, tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(generate.Tokenizer, "encode", lambda self, text: [])
    check_error(*run(capsys, "--checkpoint_path", tiny_checkpoint, "--prompt", ""), ["empty"])


# --- results ---


def test_result_line(capsys, tmp_path):
    file = tmp_path / "r.jsonl"
    flags = ["--random_weights", "tiny", "--prompt_tokens", 10, "--write_result", file, "--cache_size", 70]
    run(capsys, *flags, "--num_samples", 3, "--max_new_tokens", 5, "--kv_cache_quantization")
    run(capsys, *flags, "--max_new_tokens", 1, "--no-linear_causal_mask")
    a, b = map(json.loads, file.read_text().splitlines())
    assert not set(FIELDS) - set(a)
    names = ("model", "quantization", "kv_cache_quantization", "linear_causal_mask", "compile")
    assert [a[n] for n in names] == ["tiny", None, "int8", True, False]
    assert [b[n] for n in names] == ["tiny", None, None, False, False] and b["decode_tok_s"] is None
    assert (a["cache_size"], a["prompt_tokens"], a["new_tokens"], a["num_samples"]) == (70, 10, 15, 3)
    assert a["decode_tok_s_sd"] > 0 and b["decode_tok_s_sd"] is None and a["compile_s"] is None
    assert a["kv_cache_gb"] == 2 * 2 * 2 * 256 * (16 + 2) / 1e9  # layers, K and V, heads, slots, int8 + scale
    assert a["model_gb"] == 139584 * 2 / 1e9 and a["peak_memory_source"] == "rss" and 0.1 < a["peak_memory_gb"] < 20


def test_rates_have_the_stated_denominators():
    """mlx-engine#88, torchchat#1375: prompt / time to first token; (n - 1) / time from the first to the last token shown."""
    s = measure.Sample(10, [[1] * 5], ttft_s=2.0, times=[2.0, 2.5, 3.0, 3.5, 4.0, 9.0])  # the sixth was a stop token
    assert (s.prefill_tok_s, s.decode_tok_s) == (5.0, 2.0)
    two_rows = measure.Sample(10, [[1] * 5, [1] * 2], ttft_s=2.0, times=[2.0, 2.5, 3.0, 3.5, 4.0])
    assert (two_rows.prefill_tok_s, two_rows.decode_tok_s, two_rows.new_tokens) == (10.0, 2.5, 7)
    assert measure.Sample(10, [[1]], 2.0, [2.0]).decode_tok_s is None


def test_flags_reach_what_they_name(capsys, tmp_path, monkeypatch):
    """Each was once parsed and dropped in somebody's fork: seed, chunk, compile."""
    seen = {"seeds": [], "chunks": []}

    def spy(model, prompt, chunk, watch=None):
        seen["chunks"].append(chunk)
        return generate.prefill(model, prompt, chunk, watch)

    monkeypatch.setattr(torch, "manual_seed", seen["seeds"].append)
    monkeypatch.setattr(generate, "compile_steps", lambda *a: seen.update(compiled=a[1:]) or generate.Steps(prefill=spy))
    flags = ["--seed", 7, "--prefill_chunk", 5, "--compile", "--compile_prefill", "--max_new_tokens", 2]
    status, _, _ = run(capsys, *TINY, *flags, "--prompt_tokens", 20)
    assert status == 0 and seen["seeds"][-1] == 7 and seen["chunks"][-1] == 5 and seen["compiled"] == (True, True)


def test_the_whole_result_line_of_known_samples(monkeypatch):
    """Three samples with made-up times: every figure follows from them."""
    samples = [
        measure.Sample(10, [[1] * 5], ttft_s=2.0, times=[2.0, 2.5, 3.0, 3.5, 4.0]),
        measure.Sample(10, [[1] * 3], ttft_s=4.0, times=[4.0, 4.25, 4.5]),
        measure.Sample(10, [[1]], ttft_s=6.0, times=[6.0]),
    ]
    args = generate.build_parser().parse_args([*TINY, "--compile", "--batch_size", "1", "--cache_size", "20"])
    model = random_model(ModelArgs.from_name("tiny"), torch.device("cpu"), torch.bfloat16)
    model.setup_caches(1, 20)
    r = measure.result_line(model, args, samples, 1.5, measure.peak_memory(torch.device("cpu")), "a name")
    want = {
        "model": "tiny", "quantization": None, "kv_cache_quantization": None, "linear_causal_mask": True, "cache_size": 20,
        "prefill_chunk": 512, "prompt_tokens": 10, "new_tokens": 9, "batch_size": 1, "ttft_s": 4.0,
        "prefill_tok_s": (5 + 2.5 + 10 / 6) / 3, "decode_tok_s": 3.0, "decode_tok_s_sd": 2**0.5, "num_samples": 3,
        "model_gb": 139584 * 2 / 1e9, "device": "cpu", "precision": "bfloat16", "compile": True, "compile_prefill": False,
        "compile_s": 1.5, "torch": torch.__version__, "threads": torch.get_num_threads(), "peak_memory_source": "rss",
    }  # fmt: skip
    assert {k: r[k] for k in want} == pytest.approx(want)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if head.returncode == 0:
        assert head.stdout.startswith(r["commit"].removesuffix("-dirty"))
    high_water = int((measure.Path("/proc/self/status").read_text().split("VmHWM:")[1]).split()[0]) * 1024
    assert r["peak_memory_gb"] == pytest.approx(high_water / 1e9, rel=0.05)


def test_the_recorded_command_runs(tmp_path):
    """The ancestor's recorded command was typed by hand, and did not run."""
    file = tmp_path / "with space.jsonl"
    flags = ["--random_weights", "tiny", "--max_new_tokens", 3, "--write_result", file, "--linear_causal_mask"]
    assert process(*flags).returncode == 0
    line = json.loads(file.read_text())
    command = shlex.split(line["command"])
    assert command[:2] == ["python", "generate.py"]
    subprocess.run([sys.executable, *command[1:]], cwd=ROOT, check=True, capture_output=True)
    again = json.loads(file.read_text().splitlines()[1])
    assert all(again[k] == line[k] for k in ("command", "new_tokens", "cache_size"))


def test_no_future_warnings():
    """gpt-fast#237"""
    command = [sys.executable, "-W", "error::FutureWarning", "-W", "error::DeprecationWarning", "generate.py"]
    got = subprocess.run([*command, "--random_weights", "tiny"], cwd=ROOT, capture_output=True, text=True)
    assert got.returncode == 0, got.stderr


@needs_inductor
def test_the_ancestors_command_line_runs_unchanged(capsys, tmp_path, monkeypatch):
    """A bare model.pth and a tokenizer.model in a folder named like a known model; every flag as its users typed it."""
    folder = write_tiny(tmp_path / "someone" / "Meta-tiny-Instruct")
    torch.save(load_file(folder / "model.safetensors"), folder / "model.pth")
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
    monkeypatch.chdir(tmp_path)
    flags = "--compile --write_result benchmark_results.txt --cache_size 131072 --kv_cache_quantization"
    flags += " --linear_causal_mask --quantization int4wo-64"
    path = "someone/Meta-tiny-Instruct/model.pth"
    status, out, err = run(capsys, "--checkpoint_path", path, *flags.split())
    torch.compiler.reset()
    assert status == 0 and out.endswith("\n") and "int4wo-64: 10 linear layers quantized" in err
    line = json.loads((tmp_path / "benchmark_results.txt").read_text())
    assert (line["model"], line["quantization"], line["cache_size"], line["compile"]) == ("tiny", "int4wo-64", 131072, True)
    assert line["kv_cache_gb"] == 2 * 2 * 2 * 131072 * (16 + 2) / 1e9 and line["compile_s"] > 0
    status, _, err = run(capsys, "--checkpoint_path", path, "--precision", "torch.float32", "--max_new_tokens", 2)
    assert status == 0 and "Traceback" not in err


def test_profile_is_a_chrome_trace_of_one_more_generation(capsys, tmp_path):
    file = tmp_path / "trace.json"
    status, out, err = run(capsys, *TINY, "--max_new_tokens", 3, "--profile", file)
    assert status == 0 and len(out.split()) == 3 and str(file) in err
    names = [e.get("name", "") for e in json.loads(file.read_text())["traceEvents"]]
    assert names.count("llama::attend") == 2 * 3  # layers x (prefill and two steps)
    check_error(*run(capsys, *TINY, "--profile", tmp_path / "no" / "trace.json"), ["--profile"])


# --- ends that come early ---


def test_a_full_disk_and_a_closed_stdout_are_one_line(tmp_path):
    """A result that cannot be written is shown instead; a stdout that is closed is no place to write the report to."""
    got = process(*TINY, "--max_new_tokens", 2, "--write_result", "/dev/full")
    assert got.returncode == 1 and b"Traceback" not in got.stderr and b'"new_tokens": 2' in got.stderr
    command = shlex.join([sys.executable, "generate.py", *TINY, "--max_new_tokens", "2"])
    for redirect, status in ((">&-", 0), (">/dev/full", 1), ("2>&-", 0)):
        got = subprocess.run(["bash", "-c", f"{command} {redirect}"], cwd=ROOT, capture_output=True)
        assert got.returncode == status and b"Traceback" not in got.stderr, (redirect, got.stderr)
        assert b"memory" not in got.stdout


def test_the_default_model_is_found_from_another_folder(tmp_path):
    flags = ["--prompt", "Hi", "--max_new_tokens", "1"]
    got = subprocess.run([sys.executable, ROOT / "generate.py", *flags], cwd=tmp_path, capture_output=True)
    assert got.returncode == 0, got.stderr


def start(*argv, **more) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "generate.py", *map(str, argv)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **more,  # background jobs inherit "ignored"
    )  # fmt: skip


LONG = ("--random_weights", "tiny", "--max_new_tokens", 240, "--num_samples", 100000)


def test_a_closed_pipe_ends_quietly_and_the_result_is_kept(tmp_path):
    file = tmp_path / "r.jsonl"
    p = start(*LONG, "--write_result", file)
    p.stdout.read(20)
    p.stdout.close()
    err = p.stderr.read().decode()
    assert p.wait(60) == 0 and "Traceback" not in err and "Exception" not in err and "BrokenPipe" not in err
    assert json.loads(file.read_text())["new_tokens"] > 0


def test_ctrl_c_keeps_text_and_rates(tmp_path):
    file = tmp_path / "r.jsonl"
    p = start(*LONG, "--write_result", file)
    first = p.stdout.read(20)
    time.sleep(0.3)
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=60)
    assert p.returncode == 130 and (first + out).endswith(b"\n") and b"Traceback" not in err and b"(interrupted)" in err
    assert json.loads(file.read_text())["new_tokens"] > 0


def test_ctrl_c_in_a_pipeline_keeps_the_result(tmp_path):
    """The signal goes to the reader too: the text has nowhere to go, and the result was lost with a traceback."""
    file = tmp_path / "r.jsonl"
    p = start(*LONG, "--write_result", file)
    p.stdout.read(20)
    p.stdout.close()
    p.send_signal(signal.SIGINT)
    err = p.stderr.read().decode()
    assert p.wait(60) in (0, 130) and "Traceback" not in err and "Exception" not in err
    assert json.loads(file.read_text())["new_tokens"] > 0


def test_a_reader_of_everything_that_goes_away_loses_no_result(tmp_path):
    """`2>&1 | head`: the report had nowhere to go, and the result was lost."""
    file = tmp_path / "r.jsonl"
    flags = [*map(str, LONG[:4]), "--num_samples", "30", "--write_result", str(file)]
    command = shlex.join([sys.executable, "generate.py", *flags])
    subprocess.run(["bash", "-c", f"{command} 2>&1 | head -c 10"], cwd=ROOT, check=True, capture_output=True)
    assert json.loads(file.read_text())["new_tokens"] > 0


def test_ctrl_c_while_starting():
    p = start(*LONG, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    time.sleep(0.7)  # within the imports
    p.send_signal(signal.SIGINT)
    p.communicate(timeout=60)
    assert p.returncode in (130, -signal.SIGINT)


def test_every_flag_is_in_the_help(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0
    for flag in "--cache_size --prefill_chunk --kv_cache_quantization --no-linear_causal_mask --compile_prefill".split():
        assert flag in out
