"""scripts/convert_gguf.py on small files written here."""

import importlib.util
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from conftest import status_of
from safetensors.torch import load_file
from test_tokenizer import BYTE_LEVEL, PRE_TOKENIZERS, trained

from checkpoint import open_checkpoint
from tokenizer import load_tokenizer

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "convert_gguf.py"
LAYERS, HEADS, KV_HEADS, DIM, HIDDEN, HEAD_DIM = 2, 4, 2, 64, 96, 16


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("convert_gguf", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(script, capfd):
    """Runs the script; returns its exit status and its lines on stderr. Nothing may go to stdout."""

    def run(*arguments) -> tuple[int, list[str]]:
        status = status_of(script.cli, arguments)
        captured = capfd.readouterr()
        assert captured.out == ""
        return status, captured.err.splitlines()

    return run


def vocabulary() -> tuple[list[str], list[str]]:
    model = trained(BYTE_LEVEL)["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [" ".join(pair) for pair in model["merges"]]


def write(path: Path, *, pre="smollm", tied=True, skip=(), arch="llama", extra_tensors=(), **keys) -> dict:
    """A small GGUF llama. Returns its tensors by name. keys: metadata, with __ for a dot."""
    tokens, merges = vocabulary()
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), DIM), "output_norm": (DIM,)}
    for i in range(LAYERS):
        kv = KV_HEADS * HEAD_DIM
        for name, shape in {
            "attn_q": (DIM, DIM), "attn_k": (kv, DIM), "attn_v": (kv, DIM), "attn_output": (DIM, DIM),
            "ffn_gate": (HIDDEN, DIM), "ffn_up": (HIDDEN, DIM), "ffn_down": (DIM, HIDDEN),
            "attn_norm": (DIM,), "ffn_norm": (DIM,),
        }.items():  # fmt: skip
            shapes[f"blk.{i}.{name}"] = shape
    if not tied:
        shapes["output"] = shapes["token_embd"]
    shapes |= dict(extra_tensors)
    tensors = {f"{name}.weight": rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}

    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(DIM)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(12345.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    special = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_token_types([special[token in ("<s>", "</s>")] for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    writer.add_chat_template("{{ messages[0].content }}</s>")
    for key, value in keys.items():
        adders = {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool}
        adders[type(value)](key.replace("__", "."), value)
    stored = {}
    for name, tensor in tensors.items():
        if name in skip:
            continue
        kind = {1: gguf.GGMLQuantizationType.F32}.get(tensor.ndim, gguf.GGMLQuantizationType.Q8_0)
        if "ffn_up" in name:
            kind = gguf.GGMLQuantizationType.F16
        data = gguf.quantize(tensor, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        stored[name] = torch.from_numpy(gguf.dequantize(data, kind).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.mark.parametrize("tied", [True, False])
def test_weights_and_shape(tmp_path, run, tied):
    source = write(tmp_path / "in.gguf", tied=tied)
    assert run(tmp_path / "in.gguf", tmp_path / "deep" / "out", "--name", "tiny") == (0, [])
    ours = load_file(tmp_path / "deep" / "out" / "model.safetensors")
    expected = {"tok_embeddings": source["token_embd.weight"], "norm": source["output_norm.weight"]}
    if not tied:
        expected["output"] = source["output.weight"]
    names = {"attention.wo": "attn_output", "feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down"}
    names |= {"feed_forward.w3": "ffn_up", "attention_norm": "attn_norm", "ffn_norm": "ffn_norm"}
    for i in range(LAYERS):
        expected |= {f"layers.{i}.{name}": source[f"blk.{i}.{theirs}.weight"] for name, theirs in names.items()}
        expected[f"layers.{i}.attention.wqkv"] = torch.cat([source[f"blk.{i}.attn_{x}.weight"] for x in "qkv"])
    assert ours.keys() == {f"{name}.weight" for name in expected}
    for name, tensor in expected.items():
        assert ours[f"{name}.weight"].dtype == torch.float32
        assert torch.equal(ours[f"{name}.weight"], tensor), name
    args = open_checkpoint(tmp_path / "deep" / "out").args
    assert (args.name, args.block_size, args.n_layer, args.n_head, args.n_local_heads) == ("tiny", 128, 2, 4, 2)
    assert (args.dim, args.intermediate_size, args.head_dim, args.vocab_size) == (64, 96, 16, len(vocabulary()[0]))
    assert (args.rope_base, args.norm_eps, args.tie_word_embeddings) == (12345.0, 1e-5, tied)


@pytest.mark.parametrize("pre, kind", [("smollm", "digits"), ("gpt-2", "gpt2"), ("llama-bpe", "split")])
def test_tokenizer_files_mean_the_same_to_the_tokenizers_library(tmp_path, run, pre, kind):
    write(tmp_path / "in.gguf", pre=pre)
    run(tmp_path / "in.gguf", tmp_path / "out")
    ours, theirs = (
        load_tokenizer(tmp_path / "out"),
        tokenizers.Tokenizer.from_file(str(tmp_path / "out/tokenizer.json")),
    )
    assert json.loads((tmp_path / "out/tokenizer.json").read_text())["pre_tokenizer"] == PRE_TOKENIZERS[kind]
    assert ours.add_bos is (pre == "llama-bpe")
    for text in ("a  1 the", "I'LL   2024\n\n", "日本語"):
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text))
    assert ours.encode_chat([{"role": "user", "content": "a"}])[-1] in ours.stop_ids


@pytest.mark.parametrize("says", [True, False])
def test_bos_as_the_file_says(tmp_path, run, says):
    write(tmp_path / "in.gguf", pre="smollm" if says else "llama-bpe", tokenizer__ggml__add_bos_token=says)
    run(tmp_path / "in.gguf", tmp_path / "out")
    assert load_tokenizer(tmp_path / "out").add_bos is says


@pytest.mark.parametrize("options, reason", [
    ({"arch": "qwen2"}, "'qwen2'"), ({"pre": "deepseek-llm"}, "'deepseek-llm'"),
    ({"llama__rope__scaling__type": "linear"}, "llama.rope.scaling.type"),
    ({"extra_tensors": [("rope_freqs", (8,))]}, "rope_freqs.weight"),
    ({"extra_tensors": [("blk.0.attn_q_norm", (16,))]}, "blk.0.attn_q_norm.weight does not belong"),
    ({"skip": ["blk.1.ffn_up.weight"]}, "blk.1.ffn_up.weight is missing"),
    ({"skip": ["token_embd.weight"]}, "token_embd.weight"),
    ({"extra_tensors": [("blk.0.attn_k", (64, 64))]},
     "blk.0.attn_k.weight has shape [64, 64], its configuration asks for [32, 64]"),
])  # fmt: skip
def test_what_is_not_converted_is_refused_in_one_line(tmp_path, run, options, reason):
    write(tmp_path / "in.gguf", **options)
    status, lines = run(tmp_path / "in.gguf", tmp_path / "out")
    assert (status, len(lines)) == (2, 1)
    assert reason in lines[0]
    assert [path.name for path in tmp_path.iterdir()] == ["in.gguf"]


@pytest.mark.parametrize("keep", [0, 3, 20, 100, 3000, 0.5, 0.99, -1])
def test_a_truncated_file_is_one_line_and_leaves_nothing(tmp_path, run, keep):
    """Some cut files read fine up to the missing weights: no folder may look complete then."""
    write(tmp_path / "in.gguf")
    data = (tmp_path / "in.gguf").read_bytes()
    (tmp_path / "in.gguf").write_bytes(data[: int(keep * len(data)) if 0 < keep < 1 else keep])
    status, lines = run(tmp_path / "in.gguf", tmp_path / "out")
    assert (status, len(lines)) == (2, 1)
    assert "in.gguf: damaged" in lines[0]
    assert [path.name for path in tmp_path.iterdir()] == ["in.gguf"]


def test_an_interrupted_conversion_leaves_nothing(tmp_path, run, script, monkeypatch):
    write(tmp_path / "in.gguf")

    def interrupted(*_):
        yield "norm.weight", torch.zeros(DIM)
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "read_tensors", interrupted)
    assert run(tmp_path / "in.gguf", tmp_path / "out")[0] == 130
    assert [path.name for path in tmp_path.iterdir()] == ["in.gguf"]


def test_what_is_there_is_not_overwritten(tmp_path, run):
    write(tmp_path / "in.gguf")
    (tmp_path / "out").mkdir()
    assert run(tmp_path / "in.gguf", tmp_path / "out")[0] == 0
    before = (tmp_path / "out" / "config.json").stat()
    status, lines = run(tmp_path / "in.gguf", tmp_path / "out")
    assert (status, len(lines)) == (2, 1)
    assert "there already" in lines[0]
    assert (tmp_path / "out" / "config.json").stat() == before


def test_a_file_that_is_not_there(tmp_path, run):
    status, lines = run(tmp_path / "absent.gguf", tmp_path / "out")
    assert (status, len(lines)) == (2, 1)
    assert "absent.gguf" in lines[0]
