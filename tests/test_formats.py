"""One model in every format that checkpoint.py reads, and what it refuses."""

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from conftest import ROOT, make_model, random_prompt
from safetensors.torch import load_file, save_file
from test_model import all_logits, hf_twin

import checkpoint
import entries
import generate
import gguf_file
from checkpoint import FORMATS, empty_model, load_model, load_weights, open_checkpoint, random_checkpoint, write_checkpoint
from model import ModelArgs, RopeScaling, Transformer

CPU, F32 = torch.device("cpu"), torch.float32
SCRIPT = ROOT / "scripts" / "fuzz_checkpoints.py"
spec = importlib.util.spec_from_file_location("fuzz_checkpoints", SCRIPT)
fuzz = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fuzz)

TINY = ModelArgs.from_name("tiny")
TIED = dataclasses.replace(TINY, tie_word_embeddings=True)
PROMPT = random_prompt(40)


def logits(model: Transformer) -> torch.Tensor:
    model.setup_caches(1, 64)
    return all_logits(model, PROMPT)


def loaded(path: Path, dtype: torch.dtype = F32) -> Transformer:
    model = load_model(path, CPU, dtype)
    left = {n: t for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta or t.requires_grad}
    assert not left and all(p.dtype == dtype and p.data_ptr() % 64 == 0 for p in model.parameters())
    return model


def refused(path: Path, *words: str) -> str:
    """The message, which is one line and has the words."""
    with pytest.raises(ValueError) as e:
        load_model(path, CPU, F32)
    message = str(e.value)
    assert len(message.splitlines()) == 1, message
    for word in words:
        assert word in message, (word, message)
    return message


def edit(file: Path, **changes) -> None:
    """Change fields of a JSON file; None removes one."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


@pytest.fixture(scope="module")
def expected():
    """Weights and logits of the tiny model, float32."""
    weights = fuzz.random_weights(TINY)
    model, _ = empty_model(TINY)
    model.load_state_dict(weights, assign=True)
    return weights, logits(model)


# --- the same model ---

EXACT = {
    "ours": fuzz.write_ours,
    "Hugging Face": fuzz.write_hf,
    "Hugging Face, shards": lambda *a: fuzz.write_hf(*a, shards=3),
    "Hugging Face, .bin": lambda *a: fuzz.write_hf(*a, suffix=".bin"),
    "Hugging Face, .bin shards": lambda *a: fuzz.write_hf(*a, shards=2, suffix=".bin"),
    "Meta": fuzz.write_meta,
    "Meta, shards like Llama 2": lambda *a: fuzz.write_meta(*a, shards=2),
    "Meta, shards like Llama 3": lambda *a: fuzz.write_meta(*a, shards=2, columns=False),
    "model.pth": fuzz.write_bare,
    "GGUF": lambda *a: fuzz.write_gguf(*a, kind="F32"),
}


@pytest.mark.parametrize("name", EXACT)
def test_every_format_gives_the_same_logits_to_the_bit(tmp_path, name, expected, monkeypatch):
    monkeypatch.setattr(entries, "BLOCK_BYTES", 3000)  # several blocks, and of q and k one per head or two
    weights, want = expected
    path = EXACT[name](tmp_path / "m", TINY, weights)
    model = loaded(path)
    assert {n: torch.equal(t, weights[n]) for n, t in model.state_dict().items()} == dict.fromkeys(weights, True)
    assert torch.equal(logits(model), want)
    a, b = open_checkpoint(path).args, TINY
    if "Meta" in name:  # params.json says nothing of the context
        b = dataclasses.replace(b, block_size=a.block_size)
    assert dataclasses.replace(a, name=b.name) == b
    for entry in open_checkpoint(path).entries():
        blocks = list(entry.blocks())
        assert torch.equal(torch.cat(blocks), entry.read()) and entry.read().dtype == entry.dtype == F32
        assert tuple(entry.read().shape) == entry.shape and (len(blocks) > 1) == (entry.read().nbytes > 3000)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_stored_and_wanted_precision_are_independent(tmp_path, dtype):
    weights = fuzz.random_weights(TINY, dtype=dtype)
    for want in (torch.float32, torch.bfloat16, torch.float16):
        for write in (fuzz.write_hf, lambda *a, kind=dtype: fuzz.write_gguf(*a, kind={4: "F32"}.get(kind.itemsize) or (
            "BF16" if kind == torch.bfloat16 else "F16"))):  # fmt: skip
            model = loaded(write(tmp_path / str(want) / write.__name__, TINY, weights), want)
            assert all(torch.equal(t, weights[n].to(want)) for n, t in model.state_dict().items())


ARGS = {
    "tied": TIED,
    "untied": TINY,
    "rope scaling": dataclasses.replace(TINY, rope_scaling=RopeScaling(original_max_position=64), rope_base=5e5),
    "head dim": dataclasses.replace(TINY, head_dim=24, n_local_heads=4),
}


@pytest.mark.parametrize("name", ARGS)
def test_what_transformers_saved(tmp_path, name):
    """Its own names, its own order of rows, its own config.json; one file, and shards with an index."""
    args = ARGS[name]
    weights = fuzz.random_weights(args)
    model, _ = empty_model(args)
    model.load_state_dict(weights, assign=True)
    twin = hf_twin(model.requires_grad_(False))
    twin.save_pretrained(tmp_path / "one")
    twin.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    shards = sorted(f.name for f in (tmp_path / "shards").glob("*.safetensors"))
    assert len(shards) > 2
    want = logits(model)
    assert (want - twin(PROMPT).logits).abs().max() < 1e-4
    for folder in ("one", "shards"):
        assert torch.equal(logits(loaded(tmp_path / folder)), want)
        assert open_checkpoint(tmp_path / folder).args == dataclasses.replace(args, name=folder)
    assert open_checkpoint(tmp_path / "shards" / shards[0]).args.name == "shards"  # a file stands for its folder
    (tmp_path / "shards" / "model.safetensors.index.json").unlink()
    assert torch.equal(logits(loaded(tmp_path / "shards")), want)
    (tmp_path / "shards" / shards[-1]).unlink()  # the names say how many there are
    refused(tmp_path / "shards", shards[-1], "missing")


def test_mixed_dtypes_and_old_tables(tmp_path, expected):
    """q, k and v of a layer in different dtypes are stacked in one that holds all; inv_freq of old files is passed over."""
    path = fuzz.write_hf(tmp_path / "m", TINY, expected[0])
    tensors = load_file(path / "model.safetensors")
    names = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
    for name, dtype in zip(names, (torch.float16, torch.bfloat16, torch.float32), strict=True):
        tensors[name] = tensors[name].to(dtype)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, path / "model.safetensors")
    got = loaded(path).state_dict()["layers.0.attention.wqkv.weight"].split([64, 32, 32])
    want = expected[0]["layers.0.attention.wqkv.weight"].split([64, 32, 32])
    for g, w, dtype in zip(got, want, (torch.float16, torch.bfloat16, torch.float32), strict=True):
        assert torch.equal(g, w.to(dtype).float())
    tensors["model.inv_freq"] = torch.ones(8)  # but that suffix exactly
    save_file(tensors, path / "model.safetensors")
    refused(path, "model.inv_freq", "does not belong")


# --- GGUF ---


@pytest.mark.parametrize("kind, most", [("F16", 0.01), ("BF16", 0.1), ("Q8_0", 0.1), ("Q5_1", 0.5), ("Q4_0", 1)])
def test_gguf_within_its_rounding(tmp_path, kind, most, expected):
    path = fuzz.write_gguf(tmp_path / "m", TINY, expected[0], kind=kind)
    got = logits(loaded(path))
    error = (got - expected[1]).norm() / expected[1].norm()
    assert 0 < error < most
    # and converted to a folder, the same to the bit
    write_checkpoint(tmp_path / "ours", TINY, ((e.name, e.read().float()) for e in open_checkpoint(path).entries()))
    assert torch.equal(logits(loaded(tmp_path / "ours")), got)


@pytest.mark.parametrize("kind", (*gguf_file.PLAIN, *gguf_file.QUANTIZED))
def test_gguf_types_are_as_the_library_dequantizes_them(tmp_path, kind, monkeypatch):
    """The library cannot write most types: so random bytes, read whole and in rows."""
    monkeypatch.setattr(gguf_file, "DEQUANTIZE_BYTES", 5000)
    kind = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 256, (7, 512 // block * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("x", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stored = gguf_file.read_gguf(tmp_path / "x.gguf").tensors["x"]
    assert stored.shape == (7, 512)
    with np.errstate(all="ignore"):
        views = {"F32": np.float32, "F16": np.float16}
        want = data.view(views[kind.name]) if kind.name in views else gguf.dequantize(data, kind)
    assert np.array_equal(stored.rows(0, 7).float().numpy(), want.astype(np.float32), equal_nan=True)
    assert np.array_equal(stored.rows(3, 5).float().numpy(), want[3:5].astype(np.float32), equal_nan=True)


def llama3_factors(factor: float, base: float, head_dim: int) -> list[float]:
    """As llama.cpp's convert_hf_to_gguf.py computes them."""
    factors, low, high, old = [], 1, 4, 8192
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * base ** (i / head_dim)
        if wavelength < old / high:
            factors.append(1)
        elif wavelength > old / low:
            factors.append(factor)
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


@pytest.mark.parametrize("factor", (8, 32))
def test_gguf_of_llama_3_1_and_3_2(tmp_path, factor):
    args = dataclasses.replace(TINY, rope_base=5e5, head_dim=64, n_head=2, n_local_heads=1)
    weights, factors = fuzz.random_weights(args), llama3_factors(factor, 5e5, 64)
    path = fuzz.write_gguf(tmp_path / "a", args, weights, kind="F32", rope_factors=factors)
    assert open_checkpoint(path).args.rope_scaling == RopeScaling(factor=float(factor))
    scaled = dataclasses.replace(args, rope_scaling=RopeScaling(float(factor)))
    assert torch.equal(logits(loaded(path)), logits(loaded(fuzz.write_ours(tmp_path / "b", scaled, weights))))
    for i, wrong in enumerate([llama3_factors(16, 5e5, 64), llama3_factors(factor, 1e4, 64), factors[:-1], [1.0] * 32]):
        other = fuzz.write_gguf(tmp_path / f"c{i}", args, weights, kind="F32", rope_factors=wrong)
        refused(other, "rope_freqs.weight")


@pytest.mark.parametrize("key, value, word", [
    ("general.architecture", "qwen2", "qwen2"), ("llama.expert_count", 8, "llama.expert_count"),
    ("llama.rope.scaling.type", "yarn", "llama.rope.scaling.type"),
    ("llama.attention.sliding_window", 4096, "llama.attention.sliding_window"),
    ("llama.rope.dimension_count", 8, "llama.rope.dimension_count"), ("llama.logit_scale", 2.0, "llama.logit_scale"),
    ("llama.block_count", 3, "blk.2.attn_q.weight is missing"), ("llama.block_count", 1, "blk.1."),
    ("llama.block_count", 2**31 - 1, "is missing"), ("llama.block_count", None, "llama.block_count is missing"),
    ("llama.attention.head_count", [4, 4], "no single number"), ("split.count", 3, "one part of several"),
])  # fmt: skip
def test_gguf_metadata_that_are_refused(tmp_path, key, value, word, expected):
    file = gguf_file.read_gguf(fuzz.write_gguf(tmp_path / "m", TINY, expected[0]))
    file.metadata[key] = value
    if value is None:
        del file.metadata[key]
    with pytest.raises(ValueError, match=word):
        args = gguf_file.model_args(file, "m")
        parts = {n: [t] for n, t in file.tensors.items()}
        checkpoint._entries("m", args, parts, gguf_file.NAMES)


def test_gguf_keys_that_change_nothing_are_passed_over(tmp_path, expected):
    file = gguf_file.read_gguf(fuzz.write_gguf(tmp_path / "m", TINY, expected[0]))
    file.metadata.update({"llama.rope.scaling.type": "none", "llama.expert_count": 0, "general.name": "x", "quantize.y": 1})
    assert gguf_file.model_args(file, "tiny") == TINY


def test_a_folder_with_one_gguf_file(tmp_path, expected):
    path = fuzz.write_gguf(tmp_path / "m", TINY, expected[0])
    assert open_checkpoint(tmp_path / "m").args.name == "model"
    assert set(open_checkpoint(path).tokenizer_source) == {"tokenizer.json", "tokenizer_config.json"}
    shutil.copy(path, tmp_path / "m" / "b.gguf")
    refused(tmp_path / "m", "2 GGUF files", "b.gguf")
    assert open_checkpoint(path).args.name == "model"


# --- tied and untied ---


@pytest.mark.parametrize("write", (fuzz.write_ours, fuzz.write_hf, fuzz.write_meta, fuzz.write_gguf))
def test_tied_and_untied(tmp_path, write):
    """torchtune#1688: no output.weight where the embedding serves as the head."""
    for name, args in (("a", TIED), ("b", TINY)):
        model = loaded(write(tmp_path / name, args, fuzz.random_weights(args)))
        assert model.args.tie_word_embeddings == (args is TIED) and (model.output is None) == (args is TIED)


@pytest.mark.parametrize("write, head, embedding", [
    (fuzz.write_ours, "output.weight", "tok_embeddings.weight"),
    (fuzz.write_hf, "lm_head.weight", "model.embed_tokens.weight"),
])  # fmt: skip
def test_a_head_beside_a_tied_embedding(tmp_path, write, head, embedding):
    """Passed over where it is the embedding; else file and configuration contradict each other."""
    path = write(tmp_path / "m", TIED, fuzz.random_weights(TIED))
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {head: tensors[embedding].clone()}, path / "model.safetensors")
    assert loaded(path).output is None
    other = tensors[embedding].clone()
    other[511, 63] += 1
    save_file(tensors | {head: other}, path / "model.safetensors")
    refused(path, head, "ties")


def test_a_missing_head_is_missing(tmp_path):
    path = fuzz.write_hf(tmp_path / "m", TIED, fuzz.random_weights(TIED))
    edit(path / "config.json", tie_word_embeddings=False)
    refused(path, "lm_head.weight is missing")


# --- Hugging Face folders that are not right ---


def test_a_missing_shard_is_named(tmp_path, expected):
    """gpt-fast#75"""
    for suffix, stem in ((".safetensors", "model"), (".bin", "pytorch_model")):
        path = fuzz.write_hf(tmp_path / suffix, TINY, expected[0], shards=3, suffix=suffix)
        (path / f"{stem}-00002-of-00003{suffix}").unlink()
        refused(path, f"shard {stem}-00002-of-00003{suffix} is missing")
        edit(path / f"{stem}{suffix}.index.json", weight_map={"a": "../other"})
        refused(path, "weight_map")
    path = fuzz.write_meta(tmp_path / "meta", TINY, expected[0], shards=2)
    (path / "consolidated.00.pth").unlink()
    refused(path, "consolidated.00.pth is missing")


@pytest.mark.parametrize("changes, words", [
    ({"model_type": "gemma2"}, ["gemma2"]), ({"model_type": "qwen2"}, ["qwen2"]), ({"model_type": "mixtral"}, ["mixtral"]),
    ({"model_type": "phi3"}, ["phi3"]), ({"model_type": ["llama"]}, ["llama"]), ({"sliding_window": 9}, ["sliding_window"]),
    ({"attention_bias": True}, ["attention_bias"]), ({"mlp_bias": True}, ["mlp_bias"]), ({"hidden_act": "gelu"}, ["gelu"]),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["yarn"]), ({"quantization_config": {"bits": 4}}, ["bits"]),
    ({"num_hidden_layers": 3}, ["model.layers.2.self_attn.q_proj.weight is missing"]),
    ({"num_hidden_layers": 1}, ["model.layers.1", "does not belong"]), ({"num_hidden_layers": 2**31 - 1}, ["is missing"]),
    ({"intermediate_size": 2**31 - 1}, ["mlp.gate_proj.weight", "[128, 64]", "[2147483647, 64]"]),
    ({"vocab_size": 500}, ["embed_tokens", "[512, 64]", "[500, 64]"]), ({"hidden_size": None}, ["hidden_size", "missing"]),
    ({"rope_theta": [1]}, ["Hugging Face"]),
])  # fmt: skip
def test_configurations_that_are_refused(tmp_path, changes, words, expected):
    path = fuzz.write_hf(tmp_path / "m", TINY, expected[0])
    edit(path / "config.json", **changes)
    refused(path, str(path), *words)


@pytest.mark.parametrize("change, words", [
    (lambda t: t.pop("model.norm.weight"), ["model.norm.weight is missing"]),
    (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}), ["q_proj.bias does not belong"]),
    (lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.float64)}), ["model.norm.weight", "F64"]),
    (lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}), ["norm.weight", "int8"]),
    (lambda t: t.update({"lm_head.weight": torch.ones(512, 64).to(torch.float8_e4m3fn)}), ["lm_head.weight", "F8_E4M3"]),
    (lambda t: t.update({"model.norm.weight": torch.tensor(1.0)}), ["model.norm.weight", "[]"]),
    (lambda t: t.update({"model.norm.weight": torch.ones(64, 1)}), ["model.norm.weight", "[64, 1]", "[64]"]),
])  # fmt: skip
def test_tensors_that_are_refused(tmp_path, change, words, expected):
    path = fuzz.write_hf(tmp_path / "m", TINY, expected[0])
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    refused(path, *words)


# --- Meta's folders, and the ancestor's file ---


def test_original_below_a_hugging_face_folder(tmp_path, expected):
    """torchtune#938. Hugging Face's files come first where both are there; the tokenizer is where it is."""
    folder = tmp_path / "Some-Model"
    fuzz.write_meta(folder / "original", TINY, expected[0], shards=2)
    (folder / "original" / "tokenizer.model").write_text("x")
    (folder / "config.json").write_text(json.dumps(fuzz.hf_config(TINY)))
    original = folder / "original"
    for path in (folder, original, original / "consolidated.01.pth", original / "params.json"):
        found = open_checkpoint(path)
        assert (found.args.name, found.folder) == ("Some-Model", folder / "original")
        assert torch.equal(logits(loaded(path)), expected[1])
    (folder / "tokenizer.json").write_text("{}")
    assert open_checkpoint(folder).folder == folder
    other = fuzz.write_hf(tmp_path / "hf", TINY, fuzz.random_weights(TINY, seed=5))
    shutil.copy(other / "model.safetensors", folder)
    assert not torch.equal(logits(loaded(folder)), expected[1])


@pytest.mark.parametrize("shards", (1, 2))
@pytest.mark.parametrize("columns", (True, False))
def test_meta_without_a_vocabulary_size(tmp_path, shards, columns, expected):
    path = fuzz.write_meta(tmp_path / "m", TINY, expected[0], shards=shards, columns=columns)
    edit(path / "params.json", vocab_size=-1)
    assert open_checkpoint(path).args.vocab_size == 512
    assert torch.equal(logits(loaded(path)), expected[1])


def test_meta_shards_that_do_not_fit(tmp_path, expected):
    path = fuzz.write_meta(tmp_path / "m", TINY, expected[0], shards=4)
    (path / "consolidated.03.pth").unlink()  # nothing says that there were four
    refused(path, "tok_embeddings.weight", "[512, 64]")
    path = fuzz.write_meta(tmp_path / "n", TINY, expected[0], shards=2)
    edit(path / "params.json", multiple_of=256)
    refused(path, "feed_forward.w1.weight", "[128, 64]", "[256, 64]")
    torch.save(torch.load(path / "consolidated.00.pth") | {"x.weight": torch.ones(3)}, path / "consolidated.01.pth")
    refused(path, "consolidated.01.pth")
    (path / "params.json").unlink()
    refused(path, "params.json")


@pytest.mark.parametrize("folder", ["meta-llama/Tiny", "Meta-Tiny", "tiny-hf", "tiny-chat-hf", "tiny-Instruct", "TINY-chat",
                                    "models--meta-llama--Meta-tiny-Instruct"])  # fmt: skip
def test_names_of_bare_files(tmp_path, folder, expected):
    (tmp_path / folder).mkdir(parents=True)
    torch.save(expected[0], tmp_path / folder / "model.pth")
    for path in (tmp_path / folder, tmp_path / folder / "model.pth"):
        found = open_checkpoint(path)
        assert (found.args, found.folder) == (TINY, tmp_path / folder)
    assert torch.equal(logits(loaded(path)), expected[1])


@pytest.mark.parametrize("folder", ["my-tiny", "tiny2", "tiny-v0.1", "Llama-3.1", "meta", "hf-tiny", "tiny-chat-v1", "8B"])
def test_names_that_are_not_known_exactly(tmp_path, folder, expected):
    """gpt-fast#126: the ancestor took the longest name that was a part of the path."""
    (tmp_path / "tiny" / folder).mkdir(parents=True)
    torch.save(expected[0], tmp_path / "tiny" / folder / "model.pth")
    refused(tmp_path / "tiny" / folder, folder, "Llama-3.1-8B", "tiny-odd")


def test_a_configuration_beside_a_bare_file_decides(tmp_path, expected):
    path = fuzz.write_bare(tmp_path, TINY, expected[0])
    os.rename(path.parent, tmp_path / "whatever")
    (tmp_path / "whatever" / "config.json").write_text(json.dumps(fuzz.hf_config(TINY)))
    for path in (tmp_path / "whatever", tmp_path / "whatever" / "model.pth"):
        assert torch.equal(logits(loaded(path)), expected[1])


# --- safety ---


@pytest.mark.parametrize("name", ("model.pth", "consolidated.00.pth", "pytorch_model.bin"))
@pytest.mark.parametrize("how", ("zip", "plain"))
def test_code_in_a_pickle_does_not_run(tmp_path, name, how, expected):
    write = {"model.pth": fuzz.write_bare, "consolidated.00.pth": fuzz.write_meta}.get(name, EXACT["Hugging Face, .bin"])
    path = write(tmp_path / "m", TINY, expected[0])
    file = (path if path.is_dir() else path.parent) / name
    torch.save({"norm.weight": fuzz._Code()}, file, _use_new_zipfile_serialization=how == "zip")  # it would end this process
    refused(path, name, "damaged")


def test_a_small_file_cannot_become_a_huge_tensor(tmp_path, expected):
    path = fuzz.write_bare(tmp_path / "m", TINY, expected[0])
    torch.save(expected[0] | {"tok_embeddings.weight": torch.ones(1).expand(512, 64)}, path)
    refused(path, "tok_embeddings.weight")


def test_unreadable_paths_list_what_can_be_read(tmp_path, expected):
    (tmp_path / "notes.txt").write_text("x")
    for path in (tmp_path, tmp_path / "notes.txt"):
        refused(path, *FORMATS)
    refused(tmp_path / "absent", "quickstart.sh")
    refused(tmp_path / ("x" * 300), "--checkpoint_path")
    for wrong in ("model.safetensors", "x.gguf", "tiny/model.pth"):  # a text under each ending
        (tmp_path / wrong).parent.mkdir(exist_ok=True)
        (tmp_path / wrong).write_text("a text, and no tensors at all")
        refused(tmp_path / wrong)


def test_ours_of_another_version(tmp_path, expected):
    path = fuzz.write_ours(tmp_path / "m", TINY, expected[0])
    edit(path / "config.json", format="llama-flat-9")
    refused(path, "llama-flat-1")


# --- into a model ---


def test_all_is_checked_before_anything_is_read(tmp_path, expected, monkeypatch):
    """A tensor that is wrong is found without reading those before it."""
    opened = open_checkpoint(fuzz.write_ours(tmp_path / "m", TINY, expected[0]))
    model, _ = empty_model(TINY)

    def unreadable(start, stop):
        raise AssertionError("was read")

    entries = [
        dataclasses.replace(e, parts=[dataclasses.replace(p, rows=unreadable) for p in e.parts]) for e in opened.entries()
    ]
    other = dataclasses.replace(entries[0], name="x.weight")
    for wrong, word in ((entries[:-1], "missing"), ([*entries, entries[0]], "twice"), ([*entries, other], "not belong")):
        with pytest.raises(ValueError, match=word):
            load_weights(model, dataclasses.replace(opened, entries=lambda wrong=wrong: iter(wrong)), CPU, F32)


class Taker(torch.nn.Module):
    """A layer that keeps rows in another form."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.register_buffer("codes", torch.empty(shape, dtype=torch.int8, device="meta"))

    def take_rows(self, start, rows):
        assert rows.nbytes <= 64 * 10**6 and self.codes.device == CPU
        self.codes[start : start + len(rows)] = (rows.float() * 10).to(torch.int8)

    def prepare(self, dtype, device):
        self.prepared = dtype, device


def test_layers_that_take_rows(tmp_path, expected, monkeypatch):
    monkeypatch.setattr(entries, "BLOCK_BYTES", 3000)
    opened = open_checkpoint(fuzz.write_hf(tmp_path / "m", TINY, expected[0]))
    model, _ = empty_model(TINY)
    taker = model.layers[1].attention.wqkv = Taker((128, 64))
    load_weights(model, opened, CPU, torch.bfloat16)
    assert torch.equal(taker.codes, (expected[0]["layers.1.attention.wqkv.weight"] * 10).to(torch.int8))
    assert taker.prepared == (torch.bfloat16, CPU) and model.norm.weight.dtype == torch.bfloat16
    # what was kept is a checkpoint too: buffers of their own dtype
    write_checkpoint(tmp_path / "q", TINY, model.state_dict().items(), quantization="by ten")
    found = open_checkpoint(tmp_path / "q")
    assert found.quantization == "by ten"
    again, _ = empty_model(TINY)
    again.layers[1].attention.wqkv = Taker((128, 64))
    load_weights(again, found, CPU, torch.bfloat16)
    assert torch.equal(again.layers[1].attention.wqkv.codes, taker.codes)
    # not into a model that keeps floats there, and not with more layers than there are
    with pytest.raises(ValueError, match=r"wqkv\.codes. does not belong"):
        load_weights(empty_model(TINY)[0], found, CPU, F32)
    edit(tmp_path / "q" / "config.json", n_layer=2**31 - 1)
    refused(tmp_path / "q", "2147483647 layers")
    edit(tmp_path / "q" / "config.json", n_layer=2, dim=2**30, vocab_size=2**30, head_dim=16)
    refused(tmp_path / "q", "bytes")


def test_random_weights():
    args = dataclasses.replace(TINY, vocab_size=100000)
    a, b = (checkpoint.random_model(args, CPU, dtype, seed=3) for dtype in (torch.bfloat16, torch.float32))
    for name, t in a.state_dict().items():
        assert t.dtype == torch.bfloat16 and torch.equal(t.float(), b.state_dict()[name])
        assert (t == 1).all() if "norm" in name else 0.019 < t.float().std() < 0.021
    assert len(list(next(random_checkpoint(args, CPU).entries()).blocks())) > 1
    other = checkpoint.random_model(args, CPU, torch.bfloat16, seed=4)
    assert not torch.equal(other.tok_embeddings.weight, a.tok_embeddings.weight)


def test_a_written_folder_is_readable_by_others(tmp_path, expected):
    """The safetensors library makes its files private; shards get numbers."""
    old = os.umask(0o022)
    try:
        write_checkpoint(tmp_path / "m", TINY, expected[0].items())
    finally:
        os.umask(old)
    assert all(f.stat().st_mode & 0o777 == 0o644 for f in (tmp_path / "m").iterdir())


def test_a_large_checkpoint_is_written_in_shards(tmp_path, monkeypatch):
    """One file once took the place of the other; bfloat16 and readable by others, as the rest."""
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 60_000)
    model = make_model("tiny", torch.bfloat16)
    checkpoint.write_checkpoint(tmp_path / "m", model.args, model.state_dict().items())
    files = sorted((tmp_path / "m").glob("*.safetensors"))
    assert len(files) > 3 and all(f.stat().st_mode & 0o444 == 0o444 for f in files)
    read = {e.name: e.read() for e in checkpoint.open_checkpoint(tmp_path / "m").entries()}
    assert read.keys() == model.state_dict().keys()
    assert all(torch.equal(read[n], t) for n, t in model.state_dict().items())


# --- damage ---


def test_damaged_checkpoints_load_or_are_refused_in_one_line():
    """150 variants here; the script does thousands."""
    got = subprocess.run([sys.executable, SCRIPT, "--count", "150", "--seed", "7"], capture_output=True, text=True,
                         env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    assert got.returncode == 0 and got.stdout.startswith("150 variants: ") and got.stderr == "", got.stdout + got.stderr


def test_damaged_checkpoints_through_the_command_line(tmp_path, capsys):
    paths, statuses = fuzz.write_all(tmp_path / "all"), []
    for number in range(0, 60, 3):
        what, path = fuzz.damaged(paths, tmp_path / str(number), 3, number)
        flags = ["--checkpoint_path", str(path), "--prompt", "x", "--max_new_tokens", "1", "--precision", "float32"]
        capsys.readouterr()
        try:
            status = generate.cli(flags)
        except SystemExit as e:
            status = e.code
        out, err = capsys.readouterr()
        assert status in (0, 2), what
        assert status == 0 or (out == "" and err.count("\n") == 1 and "Traceback" not in err), (what, err)
        statuses.append(status)
    assert len(statuses) == 20 and statuses.count(2) >= 10
