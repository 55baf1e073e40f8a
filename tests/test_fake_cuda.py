"""Host and device are told apart: the whole of `generate` on fake CUDA tensors, where a tensor on the wrong device is an
error as on a card. Nothing is computed: this shows that every step runs, on which device, and in which shapes."""

import pytest
import torch

from attention import KV_CACHES
from checkpoint import load_model, open_checkpoint, random_model
from generate import Sampling, Steps, generate, run_tiles
from memory import simulated_cuda
from model import ModelArgs

SAMPLINGS = (Sampling(0), Sampling(0.8, 200, 0.9))


@pytest.mark.parametrize("linear", (True, False))
@pytest.mark.parametrize("kind", KV_CACHES)
@pytest.mark.parametrize("name", ("tiny", "tiny-odd"))
def test_generate_runs_on_fake_cuda(name, kind, linear):
    with simulated_cuda() as cuda:
        model = random_model(ModelArgs.from_name(name), cuda, torch.bfloat16)
        model.setup_caches(2, 256, kind, linear)
        prompt = torch.zeros(2, 200, dtype=torch.int64)
        for sampling in SAMPLINGS:
            tokens = list(generate(model, prompt, 5, sampling, 73, Steps()))
            assert len(tokens) == 5
            assert all(t.device == cuda and t.shape == (2, 1) and t.dtype == torch.int64 for t in tokens)
    host = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.device != cuda]
    assert not host


def test_a_tensor_left_on_the_host_is_an_error():
    with simulated_cuda() as cuda:
        model = random_model(ModelArgs.from_name("tiny"), cuda, torch.bfloat16)
        model.setup_caches(1, 64)
        model.layers[1].ffn_norm.weight = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16), requires_grad=False)
        with pytest.raises(RuntimeError, match="device"):
            run_tiles(model, [torch.zeros(1, 32, dtype=torch.int64).to(cuda)], [torch.tensor([0, 0, 9]).to(cuda)])


def test_simulated_indexing_equals_indexing():
    """The replacement of __getitem__ and __setitem__, on real tensors."""
    from memory import _index

    x = torch.arange(60).view(3, 4, 5)
    tuples = ((slice(None), 2), (None, 1, ..., -1), (..., None), (0, slice(0, 4, 2), slice(1, None)))
    for index in (1, -1, slice(1, 3), *tuples):
        assert torch.equal(_index(x, index), x[index]), index
    with pytest.raises(NotImplementedError):
        _index(x, torch.tensor([0]))


def test_loading_moves_tensor_by_tensor(tiny_checkpoint):
    """Loading on a simulated card needs no data: the reader's entries carry shape and dtype without reading."""
    entries = {e.name: (e.shape, e.dtype) for e in open_checkpoint(tiny_checkpoint).entries()}
    model = load_model(tiny_checkpoint, torch.device("cpu"), torch.float32)
    assert entries == {n: (tuple(p.shape), p.dtype) for n, p in model.named_parameters()}
    assert not [n for n, p in model.named_parameters() if p.is_meta]
