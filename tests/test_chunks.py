"""The chunk size, the state of the caches and earlier runs never change a result, to the bit."""

import itertools
import subprocess
import sys
import weakref

import pytest
import torch
from conftest import ROOT, equal, greedy, make_model, random_prompt, run_all, spoil

from attention import KV_CACHES, TILE_HEIGHTS
from generate import Sampling, Steps, generate, prefill
from model import prefill_plan

KINDS, MASKS, DTYPES = list(KV_CACHES), (True, False), (torch.float32, torch.bfloat16, torch.float16)
MODELS = ("tiny", "tiny-odd")


def test_plan_covers_every_token_once_at_its_own_row():
    for T in (1, 31, 32, 33, 128, 129, 255, 256, 257, 300, 512, 892):
        heights = {}
        for chunk in (1, 5, 73, 256, 300, 2000):
            seen = []
            for parts in prefill_plan(T, chunk):
                assert sum(stop - first for _, _, first, stop in parts) <= chunk
                for base, height, first, stop in parts:
                    assert base % 256 == 0 and height in TILE_HEIGHTS and 0 <= first < stop <= height
                    assert heights.setdefault(base, height) == height, "the chunk changed a tile"
                    seen += range(base + first, base + stop)
            assert seen == list(range(T))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("linear", MASKS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_chunks_change_no_bit(name, kind, linear, dtype):
    """candle#2108: 17 tokens in ragged chunks, a last chunk of one, and chunks longer than prompt and cache."""
    model = make_model(name, dtype)
    model.setup_caches(1, 24, kind, linear)
    one_shot = run_all(model, random_prompt(17), 17)
    assert one_shot[0].isfinite().all()
    for chunk in (1, 2, 4, 5, 16, 18, 1000):
        assert equal(run_all(model, random_prompt(17), chunk), one_shot), chunk


@pytest.mark.parametrize("batch", (1, 2))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("T", (255, 130, 251))
def test_chunks_over_tiles_and_batches(T, kind, batch):
    """Chunk borders within a tile; a prompt of block_size - 1; both masks give the same bits."""
    model, prompt, results = make_model("tiny"), random_prompt(T, batch), []
    for linear in MASKS:
        model.setup_caches(batch, 256, kind, linear)
        results += [run_all(model, prompt, chunk, n=2) for chunk in (T, 1, 73, 64, 129)]
    assert all(equal(r, results[0]) for r in results)


def test_chunks_over_several_tiles():
    """Longer than two full tiles, so that blocks before the diagonal and a shorter last tile take part."""
    import dataclasses

    model = make_model("tiny-odd")
    model.args = dataclasses.replace(model.args, block_size=1024)
    for kind, linear in itertools.product(KINDS, MASKS):
        model.setup_caches(1, 620, kind, linear)
        one_shot = run_all(model, random_prompt(600), 600)
        for chunk in (73, 256, 300):
            assert equal(run_all(model, random_prompt(600), chunk), one_shot), (kind, linear, chunk)


def test_sampled_text_is_equal_for_every_chunk():
    model = make_model("tiny")
    model.setup_caches(1, 120, "int8")
    texts = []
    for chunk in (100, 7, 64):
        torch.manual_seed(5)
        texts.append(torch.cat(list(generate(model, random_prompt(100), 20, Sampling(), chunk, Steps())), 1).tolist())
    assert texts[0] == texts[1] == texts[2] and len(set(texts[0][0])) > 3


def test_cached_keys_of_a_chunk_are_at_absolute_positions():
    """transformers#43082, tt-metal#21513: a chunk counted its positions from 0. The cached K shows it."""
    model, prompt = make_model("tiny"), random_prompt(40)
    model.setup_caches(1, 64)
    prefill(model, prompt, 13)
    chunked = model.layers[0].attention.kv_cache.stored[0].clone()
    for p in (0, 12, 13, 14, 39):
        # layer 0's key depends on token and position alone: computed here from the weights
        x = model.layers[0].attention_norm([model.tok_embeddings.weight[prompt[:, p]]])
        k = (x[0] @ model.layers[0].attention.wqkv.weight.T)[:, 64:96].view(2, 8, 2).double()
        angle = p * 10000.0 ** -(torch.arange(8, dtype=torch.float64) / 8)
        a, b = k[..., 0], k[..., 1]
        want = torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).view(2, 16)
        assert torch.allclose(chunked[0, 0, :, p].double(), want, atol=1e-5), p


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("linear", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_b_a_equals_fresh_models(kind, linear, name):
    """gpt-fast's caches and a mask row written for another prompt lived on into the second sample."""
    a, b = random_prompt(100, seed=1), random_prompt(37, seed=2)

    def fresh(prompt):
        model = make_model(name)
        model.setup_caches(1, 128, kind, linear)
        return prefill(model, prompt, 64), greedy(model, prompt, 12, 64)

    model = make_model(name)
    model.setup_caches(1, 128, kind, linear)
    for prompt, spoiled in ((a, False), (b, False), (a, False), (b, True), (a, True)):
        if spoiled:
            spoil(model)
        assert equal((prefill(model, prompt, 64), greedy(model, prompt, 12, 64)), fresh(prompt))


def test_a_fresh_process_gives_the_same_text(tiny_checkpoint):
    """A, B, A through the command line's samples: the first and the third of one process and those of fresh ones."""
    command = [sys.executable, "generate.py", "--checkpoint_path", str(tiny_checkpoint), "--prompt", "abc", "--ignore_eos"]
    command += ["--max_new_tokens", "12", "--precision", "float32", "--kv_cache_quantization"]

    def run(*more):
        return subprocess.run([*command, *more], cwd=ROOT, capture_output=True, check=True).stdout

    assert run("--temperature", "0", "--num_samples", "3") == 3 * run("--temperature", "0")
    assert run("--num_samples", "2").startswith(run())


def test_a_second_setup_takes_effect_and_frees_the_first():
    """setup_caches returned early, and kept the old size, kind and mask."""
    model = make_model("tiny")
    model.setup_caches(1, 300, "plain", False)
    assert model.shared.mask.shape == (300, 300)
    old, alive = [weakref.ref(b) for b in model.buffers()], []
    with Allocations(lambda: alive.append(sum(r() is not None for r in old))):
        model.setup_caches(2, 64, "int8", True)
    assert len(old) >= 6 and alive[0] == 0, "something old was alive when the first new tensor was made"
    assert model.shared.mask is None and model.shared.kind == "int8"
    codes, scale = model.layers[0].attention.kv_cache.stored
    assert codes.shape == (2, 2, 2, 256, 16) and codes.dtype == torch.int8 and scale.dtype == torch.bfloat16


class Allocations(torch.utils._python_dispatch.TorchDispatchMode):
    """Every tensor that an operator returns: (operator, shape, dtype, storage); calls `before` before each operator."""

    def __init__(self, before=lambda: None):
        super().__init__()
        self.seen, self.before = [], before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.before()
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor):
                self.seen.append((str(func), tuple(t.shape), t.dtype, t.untyped_storage().data_ptr()))
        return out


def test_the_int8_cache_is_born_int8():
    """mlx-engine#82: a float cache of full size was made first and quantized afterwards."""
    model = make_model("tiny")
    with Allocations() as mode:
        model.setup_caches(1, 512, "int8")
    cache_values = 2 * 2 * 512 * 16
    rope_values = 512 * 16  # the float64 table and its parts are smaller than half a cache
    assert rope_values < cache_values / 2
    floats = [s for s in mode.seen if s[2].is_floating_point and torch.Size(s[1]).numel() >= cache_values / 2]
    assert not [s for s in floats if s[1] != (256, 256)], floats
    assert sum(s[2] == torch.int8 for s in mode.seen) == len(model.layers)
    assert not [b for b in model.buffers() if b.is_floating_point() and b.dim() == 5]


def test_the_square_mask_is_made_first_and_once():
    """The ancestor made ones, then a lower triangle of them: 17 GB twice at 131,072 slots."""
    model = make_model("tiny")
    with Allocations() as mode:
        model.setup_caches(1, 700, "plain", False)
    square = [s for s in mode.seen if s[1] == (700, 700)]
    assert len({storage for *_, storage in square}) == 1
    assert mode.seen.index(square[0]) == 0
    assert torch.equal(model.shared.mask, torch.ones(700, 700).tril().bool())


def test_no_square_mask_by_default():
    model = make_model("tiny")
    with Allocations() as mode:
        model.setup_caches(1, 700, "plain")
        prefill(model, random_prompt(30), 512)
    assert not [s for s in mode.seen if s[1][-2:] == (700, 700)]


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_last_position_meets_the_head(kind):
    model = make_model("tiny")
    model.setup_caches(1, 256, kind)
    shapes = []
    model.output.register_forward_pre_hook(lambda _, args: shapes.append(args[0][0].shape))
    prefill(model, random_prompt(200), 64)
    assert shapes == [(1, 1, 64)]
