"""torch.compile: one graph, no recompiles, the same promises as eager."""

import pytest
import torch
from conftest import equal, greedy, make_model, needs_inductor, random_prompt, run_all, spoil, stored
from torch._dynamo.utils import counters

import generate
from attention import KV_CACHES, TILE_HEIGHTS
from generate import compile_steps, prefill

CPU, pytestmark = torch.device("cpu"), needs_inductor


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def test_nothing_is_compiled_unless_asked(monkeypatch):
    """transformers#38028: chunked prefill compiled on its own."""
    monkeypatch.setattr(torch, "compile", lambda *a, **k: pytest.fail("torch.compile was called"))
    steps = generate.Steps()
    model = make_model()
    model.setup_caches(1, 64)
    greedy(model, random_prompt(40), 3, 7, steps)
    assert graphs() == 0


def test_tokens_do_not_alias_the_output_of_a_graph():
    """gpt-fast#232: a CUDA graph writes every step's token to the same memory; whoever kept one saw it change."""
    model, static = make_model(), torch.zeros(1, 1, dtype=torch.int64)
    model.setup_caches(1, 64)
    steps = generate.Steps(decode=lambda model, token, pos, sampling: static.add_(1))
    tokens = list(generate.generate(model, random_prompt(5), 4, generate.Sampling(0), 512, steps))
    assert [t.item() for t in tokens[1:]] == [1, 2, 3]


@pytest.mark.parametrize("kind", KV_CACHES)
def test_decode_is_one_graph_for_200_steps_and_20_prompt_lengths(kind):
    """torchtune#1663, gpt-fast#81: a recompile per position, or per prompt length."""
    model = make_model()
    model.setup_caches(1, 256, kind)
    steps = compile_steps(CPU, decode=True, tiles=False)
    compiled = greedy(model, random_prompt(20), 4, steps=steps)
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled = greedy(model, random_prompt(20), 201, steps=steps)
        for T in range(1, 240, 12):
            greedy(model, random_prompt(T), 3, steps=steps)
    assert graphs() == 1 and not counters["graph_break"]
    # float32, greedy: the compiled text is the eager one
    assert compiled == greedy(model, random_prompt(20), 201)


@pytest.mark.parametrize("linear", (True, False))
def test_compiled_prefill_is_one_graph_per_tile_height_and_chunks_change_no_bit(linear):
    model = make_model("tiny-odd")
    model.setup_caches(1, 256, "int8", linear)
    steps = compile_steps(CPU, decode=False, tiles=True)
    for T in (20, 50, 100, 200):  # every tile height
        greedy(model, random_prompt(T), 2, steps=steps)
    assert graphs() == len(TILE_HEIGHTS) and not counters["graph_break"]
    with torch.compiler.set_stance("fail_on_recompile"):
        for T in (100, 250):
            results = []
            for chunk in (T, 1, 73, 64):
                spoil(model)
                logits = steps.prefill(model, random_prompt(T), chunk)
                results.append((logits, stored(model, T)))
            assert all(equal(r, results[0]) for r in results)
            eager = prefill(model, random_prompt(T), T)
            assert (logits - eager).abs().max() < 0.05 * eager.std()


def test_a_b_a_compiled():
    model = make_model()
    model.setup_caches(1, 128, "int8")
    steps = compile_steps(CPU, decode=True, tiles=True)
    runs = []
    for seed, T in ((1, 100), (2, 37), (1, 100)):
        spoil(model)
        prompt = random_prompt(T, seed=seed)
        runs.append((steps.prefill(model, prompt, 64), greedy(model, prompt, 20, 64, steps)))
    assert equal(runs[0], runs[2]) and not equal(runs[0][1], runs[1][1])


def test_a_new_configuration_after_compiling_takes_effect():
    """Another kind, mask and size on the same compiled steps."""
    model, steps = make_model(), compile_steps(CPU, decode=True, tiles=False)
    for kind, linear, size in (("plain", True, 64), ("int8", True, 64), ("int8", False, 50), ("plain", True, 64)):
        model.setup_caches(1, size, kind, linear)
        assert greedy(model, random_prompt(30), 12, steps=steps) == run_all(model, random_prompt(30), 30, n=12)[2]
        assert model.shared.kind == kind
