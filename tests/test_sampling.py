"""Sampling: distributions, limits and precisions."""

import pytest
import torch

from generate import Sampling, logits_to_probs, sample

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, 3.0]])


def test_probabilities_are_the_softmax_at_a_temperature():
    for t in (0.1, 1.0, 7.0):
        want = torch.softmax(LOGITS.double() / t, -1).float()
        assert torch.allclose(logits_to_probs(LOGITS, Sampling(t, 0)), want, atol=1e-6)


@pytest.mark.parametrize("k", (0, 1, 2, 5, 200))
def test_top_k_keeps_k(k):
    probs = logits_to_probs(LOGITS, Sampling(1.0, k))
    assert (probs > 0).sum() == (min(k, 5) or 5) and probs.sum() == pytest.approx(1)
    assert probs.argmax() == 4


def test_top_k_1_is_greedy_among_equals():
    """In bfloat16 the largest two logits are often equal, and both were kept."""
    probs = logits_to_probs(torch.tensor([[1.0, 5.0, 5.0, 5.0]], dtype=torch.bfloat16), Sampling(1.0, 1))
    assert (probs > 0).sum() == 1


@pytest.mark.parametrize("p, kept", ((1.0, 5), (0.98, 4), (0.7, 2), (0.1, 1), (1e-9, 1)))
def test_top_p_keeps_the_most_probable_until_their_sum_reaches_p(p, kept):
    # softmax of 3, 2, 1, 0, -1: 0.636, 0.234, 0.086, 0.032, 0.012
    probs = logits_to_probs(LOGITS, Sampling(1.0, 0, p))
    assert (probs > 0).sum() == kept and probs[0, 4] > 0


def test_draws_follow_the_distribution():
    torch.manual_seed(0)
    draws = sample(LOGITS.repeat(20000, 1), Sampling(1.0, 0, 0.9)).flatten()
    share = torch.bincount(draws, minlength=5) / 20000
    want = logits_to_probs(LOGITS, Sampling(1.0, 0, 0.9))[0]
    assert want[0] == 0 or want[3] == 0
    want = want / want.sum()
    assert (share - want).abs().max() < 0.015  # 4 standard errors


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
@pytest.mark.parametrize("temperature", (0.0, 1e-50, 1e-40, 1e-8, 1e-3))
def test_temperature_zero_in_every_dtype(dtype, temperature):
    """torchchat#259: logits / 1e-5 overflowed in float16, and every probability was NaN."""
    logits = torch.full((2, 512), -60000.0, dtype=dtype)
    logits[0, 7], logits[1, 9] = 60000.0, 1.0
    assert sample(logits, Sampling(temperature)).tolist() == [[7], [9]]


def test_a_seed_repeats():
    logits = torch.randn(3, 512)
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        draws.append([sample(logits, Sampling(1.5)).tolist() for _ in range(5)])
    assert draws[0] == draws[1] and len({str(d) for d in draws[0]}) > 1
