"""Weight schemes: what is stored, how it is multiplied, and that the promises of the float model hold for each."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import SMOLLM2, equal, greedy, make_model, needs_inductor, random_prompt, run_all, spoil, stored, write_tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

import quantize
from attention import KV_CACHES
from checkpoint import empty_model, load_weights, open_checkpoint, random_checkpoint
from entries import Checkpoint, Entry, Part
from generate import Sampling, Steps, compile_steps, generate, prefill
from memory import simulated_cuda
from model import Call, ModelArgs
from quantize import QUANTIZERS, Int4Linear, Int8Linear, quantize_int4, quantize_int8, swap_layers

CPU, F32, BF16, F16 = torch.device("cpu"), torch.float32, torch.bfloat16, torch.float16


class Scratch:
    """What a layer asks of `Shared`."""

    def __init__(self, layer, dtype):
        values, scratch = layer.buffer_sizes(dtype)
        self.weight_buffer = torch.full((values,), float("nan"), dtype=dtype)
        self.weight_scratch = torch.full((scratch,), 255, dtype=torch.uint8)


def dequantized(layer) -> torch.Tensor:
    """The weight that a layer stands for, float64 [out, in], straight from the definition."""
    if isinstance(layer, Int8Linear):
        return layer.codes.double() * layer.scales.double()[:, None]
    codes = torch.stack([layer.codes >> 4, layer.codes & 15], -1).flatten(1)
    g = layer.groupsize
    return codes * layer.scales.double().repeat_interleave(g, 1) + layer.minima.double().repeat_interleave(g, 1)


def layer_of(scheme: str, weight: torch.Tensor, dtype: torch.dtype):
    with torch.device("meta"):
        layer = QUANTIZERS[scheme].layer(tuple(weight.shape))
    if isinstance(layer, str):
        return layer
    layer.to_empty(device=CPU)
    for start in range(0, len(weight), 100):
        layer.take_rows(start, weight[start : start + 100])
    layer.prepare(dtype, CPU)
    return layer


# --- what is stored ---


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.sampled_from((32, 64, 128)), st.floats(-4, 3), st.floats(-3, 3))
def test_int4_is_within_half_a_step(seed, groupsize, log_scale, offset):
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(3, 256, generator=g) * 10**log_scale + offset
    codes, scales, minima = quantize_int4(rows, groupsize)
    layer = Int4Linear(3, 256, groupsize)
    layer.codes, layer.scales, layer.minima = codes, scales, minima
    step = scales.double().repeat_interleave(groupsize, 1)
    # half a step, and what rounding minimum and scale to float16 moves at the ends
    slack = 2.0**-11 * (rows.abs().amax() + 16 * step) + 2.0**-24 * 16
    assert ((dequantized(layer) - rows.double()).abs() <= step / 2 + slack).all()


def test_weights_on_a_4_bit_grid_come_back_exactly():
    """The default model's file holds scale * code + minimum with float16 scales: nothing may be lost on the way."""
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(16, (64, 20, 32), generator=g)
    codes[..., 0], codes[..., 1] = 0, 15  # as its quantizer leaves them: both ends are used
    scales, minima = (torch.randn(64, 20, 1, generator=g).half().float() * f for f in (0.01, 0.1))
    scales, minima = scales.abs().half().float(), minima.half().float()
    weight = (codes * scales + minima).flatten(1)
    assert torch.equal(dequantized(layer_of("int4wo-32", weight, F32)).float(), weight)


def test_even_inputs_are_in_the_high_nibble():
    row = torch.arange(32.0)[None] % 16
    codes, scales, minima = quantize_int4(row, 32)
    assert codes[0, :3].tolist() == [0x01, 0x23, 0x45] and scales.item() == 1 and minima.item() == 0


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.floats(-30, 30))
def test_int8_is_within_half_a_step(seed, log_scale):
    rows = torch.randn(4, 50, generator=torch.Generator().manual_seed(seed)) * 10**log_scale
    rows[2] = 0
    codes, scales = quantize_int8(rows)
    assert codes.abs().max() <= 127 and not codes[2].any()
    error = (codes.double() * scales.double()[:, None] - rows.double()).abs()
    assert (error <= scales.double()[:, None] * 0.501 + 1e-40).all()


def test_a_weight_that_float16_cannot_hold_becomes_the_largest_that_it_can():
    _, scales, minima = quantize_int4(torch.tensor([[7e4] * 16 + [-7e4] * 16]), 32)
    assert minima.item() == -65504 and scales.isfinite().all()


# --- how it is multiplied ---


@pytest.mark.parametrize("dtype", (F32, BF16, F16), ids=str)
@pytest.mark.parametrize("scheme", QUANTIZERS)
@pytest.mark.parametrize("K", (96, 100, 512, 576, 1000))
@pytest.mark.parametrize("N", (64, 509))
def test_layers_equal_the_dequantized_reference(N, K, scheme, dtype, monkeypatch):
    """ao#2249, #848; torchchat#522: any shape is right in both phases, or refused with the reason. In blocks of rows too."""
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0)) / K**0.5
    layer = layer_of(scheme, weight, dtype)
    if isinstance(layer, str):
        assert K % QUANTIZERS[scheme].groupsize and str(K) in layer
        return
    limit = {F32: 1e-6, BF16: 8e-3, F16: 1e-3}[dtype]
    for block_bytes in (10**9, 200 * K * dtype.itemsize):
        monkeypatch.setattr(quantize, "BLOCK_BYTES", block_bytes)
        for rows, decode in ((1, True), (1, False), (40, False)):
            x = torch.randn(2, rows, K, generator=torch.Generator().manual_seed(1)).to(dtype)
            (y,) = layer([x], Call(Scratch(layer, dtype), decode, [], []))
            want = x.double() @ dequantized(layer).T
            assert y.dtype == dtype and y.shape == (2, rows, N)
            assert (y.double() - want).norm() / want.norm() < limit
    assert layer.packed == (dtype == BF16 and (K % 16 == 0 if scheme == "int8wo" else N % 16 == 0))


@pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
def test_expanding_allocates_nothing_and_passes_opcheck(dtype):
    layer = layer_of("int4wo-64", torch.randn(1500, 2048), dtype)
    s = Scratch(layer, dtype)
    args = (layer.codes, layer.scales, layer.minima, layer.table, s.weight_scratch, s.weight_buffer)
    torch.ops.llama_weights.expand_int4(*args)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        torch.ops.llama_weights.expand_int4(*args)
    assert sum(max(e.self_cpu_memory_usage, 0) for e in p.events()) < 2**20
    torch.library.opcheck(torch.ops.llama_weights.expand_int4.default, args, test_utils=("test_schema", "test_faketensor"))
    small = layer_of("int8wo", torch.randn(8, 16), dtype)
    args = (small.codes, Scratch(small, dtype).weight_buffer)
    torch.library.opcheck(torch.ops.llama_weights.expand_int8.default, args)


# --- whole models ---


def quantized_model(scheme: str, dtype=F32, args="tiny", keep_head=False):
    """A tiny model with quantized layers, made from make_model's weights."""
    source = make_model(args)
    model, _ = empty_model(source.args)
    swap_layers(model, scheme, keep_head)
    def parts(t):
        return [Part(tuple(rows.shape), t.dtype, lambda a, b, rows=rows: rows[a:b]) for rows in t.split(50)]

    entries = [Entry(n, parts(t)) for n, t in source.state_dict().items()]
    load_weights(model, Checkpoint(Path("m"), Path("m"), source.args, None, lambda: iter(entries)), CPU, dtype)
    return model.requires_grad_(False)


SCHEMES = ("int8wo", "int4wo-32", "int4wo-64")


@pytest.mark.parametrize("keep_head", (False, True))
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ("tiny", "tiny-odd"))
def test_quantized_models_equal_float_models_of_the_same_weights(name, scheme, keep_head):
    """tiny-odd: 96 is no multiple of 64, 288 neither: refused with the reason; 512 and tied embeddings otherwise."""
    try:
        model = quantized_model(scheme, F32, name, keep_head)
    except ValueError as e:
        assert name == "tiny-odd" and scheme == "int4wo-64" and "96 is no multiple of 64" in str(e)
        return
    twin, weights = make_model(name), {}
    for key, value in twin.state_dict().items():
        layer = model.get_submodule(key.removesuffix(".weight"))
        weights[key] = dequantized(layer).float() if isinstance(layer, quantize.QuantizedLinear) else value
    assert sum(not torch.equal(weights[k], v) for k, v in twin.state_dict().items()) >= 10 + (not keep_head)
    twin.load_state_dict(weights)
    for m in (model, twin):
        m.setup_caches(1, 64)
    prompt = random_prompt(40)
    assert (prefill(model, prompt, 7) - prefill(twin, prompt, 40)).abs().max() < 1e-4
    assert greedy(model, prompt, 10) == greedy(twin, prompt, 10)


@pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
@pytest.mark.parametrize("kind", KV_CACHES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_chunks_change_no_bit_with_weight_schemes(scheme, kind, dtype):
    """candle#2108 was about quantized models."""
    model = quantized_model(scheme, dtype)
    model.setup_caches(1, 160, kind)
    one_shot = run_all(model, random_prompt(150), 150)
    model.shared.weight_scratch.fill_(255)
    model.shared.weight_buffer.fill_(float("nan"))
    for chunk in (1, 17, 73, 64):
        assert equal(run_all(model, random_prompt(150), chunk), one_shot), chunk


@needs_inductor
@pytest.mark.parametrize("scheme", SCHEMES)
def test_compiled_decode_and_prefill_with_weight_schemes(scheme):
    """Inductor multiplied with the next layer's weight while the buffer was read through a view of another dtype."""
    torch.compiler.reset()
    model = quantized_model(scheme, BF16)
    model.setup_caches(1, 128, "int8")
    steps, results = compile_steps(CPU, True, True), []
    greedy(model, random_prompt(100), 3, steps=steps)
    with torch.compiler.set_stance("fail_on_recompile"):
        for chunk in (100, 33):
            spoil(model)
            results.append((steps.prefill(model, random_prompt(100), chunk), stored(model, 100)))
            assert len(greedy(model, random_prompt(100), 20, chunk, steps)[0]) == 20
    assert equal(results[0], results[1])
    eager = prefill(model, random_prompt(100), 100)
    assert (results[0][0] - eager).abs().max() < 0.1 * eager.std()
    torch.compiler.reset()


@pytest.mark.parametrize("linear", (True, False))
@pytest.mark.parametrize("kind", KV_CACHES)
@pytest.mark.parametrize("scheme", QUANTIZERS)
def test_every_scheme_runs_on_fake_cuda(scheme, kind, linear):
    args = ModelArgs(block_size=512, vocab_size=500, n_layer=2, n_head=4, dim=256, intermediate_size=512, n_local_heads=2)
    with simulated_cuda() as cuda:
        model, note = quantize.load_model(random_checkpoint(args, cuda), cuda, BF16, scheme)
        model.setup_caches(2, 300, kind, linear)
        tokens = list(generate(model, torch.zeros(2, 280, dtype=torch.int64), 3, Sampling(), 73, Steps()))
        assert all(t.device == cuda and t.shape == (2, 1) for t in tokens)
    assert "10 linear layers" in note
    assert not [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.device != cuda]


# --- files ---


def run_offline(path, scheme, *more):
    import argparse

    args = {"checkpoint_path": path, "quantization": scheme, "out": None, "keep_head": False} | dict(more)
    quantize.main(argparse.Namespace(**args))


@pytest.mark.parametrize("keep_head", (False, True))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_offline_equals_at_load(tmp_path, scheme, keep_head):
    """torchchat#37, gpt-fast#217: quantize, save, load: the same logits to the bit."""
    source = write_tiny(tmp_path / "m")
    run_offline(source, scheme, ("keep_head", keep_head))
    saved = tmp_path / f"m-{scheme}"
    logits = []
    for checkpoint, asked in ((open_checkpoint(source), scheme), (open_checkpoint(saved), None)):
        model, note = quantize.load_model(checkpoint, CPU, BF16, asked, keep_head and bool(asked))
        assert note.startswith(scheme)
        model.setup_caches(1, 64)
        logits.append((prefill(model, random_prompt(30), 30), greedy(model, random_prompt(30), 9)))
    assert equal(*logits)
    assert (saved / "tokenizer.model").read_bytes() == (source / "tokenizer.model").read_bytes()
    with pytest.raises(ValueError, match="quantized already"):
        quantize.load_model(open_checkpoint(saved), CPU, BF16, next(s for s in SCHEMES if s != scheme))
    with pytest.raises(ValueError, match="quantized already"):
        run_offline(saved, scheme)
    with pytest.raises(ValueError, match="there already"):
        run_offline(source, scheme)


def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch):
    source = write_tiny(tmp_path / "m")

    def broken(*a, **k):
        raise KeyboardInterrupt

    monkeypatch.setattr(quantize, "quantize_int4", broken)
    with pytest.raises(KeyboardInterrupt):
        run_offline(source, "int4wo-32")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_unknown_stored_scheme_is_named(tmp_path):
    source = write_tiny(tmp_path / "m")
    run_offline(source, "int4wo-32")
    config = json.loads((tmp_path / "m-int4wo-32" / "config.json").read_text())
    (tmp_path / "m-int4wo-32" / "config.json").write_text(json.dumps(config | {"quantization": "int3wo"}))
    with pytest.raises(ValueError, match="int3wo"):
        quantize.load_model(open_checkpoint(tmp_path / "m-int4wo-32"), CPU, F32, None)
    shutil.rmtree(tmp_path / "m")


def test_a_layer_that_cannot_be_quantized_is_reported_and_none_at_all_is_refused():
    """torchchat#522, #1362: a silent skip."""
    model, _ = empty_model(ModelArgs.from_name("SmolLM2-135M"))
    note = swap_layers(model, "int4wo-128", False)
    assert "30 linear layers quantized" in note and "120 left in float: in_features 576 is no multiple of 128" in note
    model, _ = empty_model(ModelArgs.from_name("tiny-odd"))
    with pytest.raises(ValueError, match="no linear layer can be quantized"):
        swap_layers(model, "int4wo-256", False)


# --- the default model ---


def test_int4wo_32_of_the_default_model_keeps_its_text():
    """Its weights came from 4-bit groups of 32 with float16 scales: in float32 and with a float head every greedy text is
    the unquantized one."""
    from tokenizer import load_tokenizer

    tokenizer, texts = load_tokenizer(SMOLLM2), []
    prompts = ("Once upon a time", "The three largest planets of the solar system are", "def fibonacci(n):\n")
    for scheme in (None, "int4wo-32"):
        model, _ = quantize.load_model(open_checkpoint(SMOLLM2), CPU, F32, scheme, bool(scheme))
        model.setup_caches(1, 64)
        texts.append([greedy(model, torch.tensor([tokenizer.encode(p)]), 24) for p in prompts])
    assert texts[0] == texts[1]
    assert F.embedding(torch.tensor([5]), model.tok_embeddings.weight).dtype == F32
