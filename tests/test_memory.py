"""The model of torch's caching allocator, and the card that counts with it: rules one by one, made-up sequences against a
naive second model, and peaks that were published from a real card."""

import gzip
import json
import pickle
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.cuda import _memory_viz

import memory
from memory import COMMON, CONTEXT, GPUS, MIB, WORKSPACES, Allocator, Card, Repeated, Watch, simulated_cuda
from snapshot import simulated_snapshot, write_snapshot

TRACES = sorted((Path(__file__).parent / "data" / "alloc_traces").glob("*.json.gz"))
KIB = 1024


def layout(a: Allocator) -> list[list[tuple[int, bool]]]:
    """For each segment the size of its blocks and whether they are in use."""
    return [[(b.size, b.number is not None) for b in a.blocks(first)] for first in a.segments]


# --- against a card ---


@pytest.mark.parametrize("file", TRACES, ids=lambda file: file.name.removesuffix(".json.gz"))
def test_the_published_peaks_are_reproduced(file):
    """Each trace is one cell of a table that was measured on an A100: the replay gives its reserved bytes."""
    trace = json.loads(gzip.decompress(file.read_bytes()))
    a, blocks = Allocator(), {}
    for action, number, *size in trace["events"]:
        if action == "a":
            blocks[number] = a.malloc(*size)
        else:
            a.free(blocks.pop(number))
    assert a.peak_reserved == trace["simulated_peak_reserved_bytes"]
    assert a.peak_allocated == trace["simulated_peak_allocated_bytes"]
    assert a.peak_reserved / 1e9 == pytest.approx(trace["published_peak_reserved_gb"], rel=3e-4)


def test_every_cell_of_the_published_table_is_there():
    names = {file.name.removesuffix(".json.gz") for file in TRACES}
    assert names == {f"{2**i * KIB}_{kind}" for i in range(3, 8) for kind in ("normal", "kvq", "kvq_linear")}


# --- the rules, one by one ---


@pytest.mark.parametrize("requested, size", ((1, 512), (511, 512), (512, 512), (513, 1024), (MIB - 1, MIB), (MIB, MIB)))
def test_sizes_are_rounded_to_512_bytes(requested, size):
    a = Allocator()
    block = a.malloc(requested)
    assert (block.size, block.requested, a.allocated) == (size, requested, size)


@pytest.mark.parametrize(
    "requested, segment",
    (
        (1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (2 * MIB, 20 * MIB), (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB), (10 * MIB + 1, 12 * MIB), (11 * MIB, 12 * MIB), (12 * MIB, 12 * MIB),
        (2**30 + 1, 2**30 + 2 * MIB),
    ),
)  # fmt: skip
def test_how_large_a_segment_is(requested, segment):
    """Small ones are of 2 MiB; then 20 MiB; from 10 MiB on the size itself, rounded up to 2 MiB."""
    a = Allocator()
    a.malloc(requested)
    assert a.reserved == a.peak_reserved == segment and len(a.segments) == 1


def test_small_and_large_never_share_a_segment():
    a = Allocator()
    a.malloc(2 * MIB)  # 18 MiB are left of its segment
    a.malloc(MIB)
    assert [sum(size for size, _ in s) for s in layout(a)] == [20 * MIB, 2 * MIB]
    a.malloc(MIB + 1)  # 1 MiB is left of the small one
    assert a.reserved == 22 * MIB


def test_a_small_rest_is_split_off_down_to_512_bytes():
    a = Allocator()
    a.malloc(MIB)
    second = a.malloc(MIB - 512)
    assert layout(a) == [[(MIB, True), (MIB - 512, True), (512, False)]]
    assert a.malloc(1).size == 512 and a.reserved == 2 * MIB  # the rest serves
    assert second.size == MIB - 512


@pytest.mark.parametrize("rest, split", ((512, False), (MIB - 512, False), (MIB, False), (MIB + 512, True), (2 * MIB, True)))
def test_a_large_rest_is_split_off_above_1_mib(rest, split):
    """Exactly 1 MiB stays with the block, and counts as allocated."""
    a = Allocator()
    a.free(a.malloc(16 * MIB))
    block = a.malloc(16 * MIB - rest)
    assert layout(a) == [[(16 * MIB - rest, True), (rest, False)]] if split else [[(16 * MIB, True)]]
    assert a.allocated == block.size == 16 * MIB - rest * split
    assert a.reserved == 16 * MIB


def test_what_is_rounded_up_to_2_mib_is_allocated_too():
    """No split at 1 MiB or less: peak allocated is above the sum of the requests."""
    a = Allocator()
    a.malloc(11 * MIB)
    assert a.peak_allocated == 12 * MIB


def carve(a: Allocator, sizes: list[int], freed: list[int]) -> list:
    """Blocks of these sizes side by side in new segments; then those at the indices are freed."""
    blocks = [a.malloc(size) for size in sizes]
    for i in freed:
        a.free(blocks[i])
    return blocks


def test_the_smallest_free_block_that_fits_is_taken():
    a, K = Allocator(), 64 * KIB
    blocks = carve(a, [8 * K, K, 4 * K, K, 2 * K, K, 6 * K, K], [0, 2, 4, 6])
    assert a.malloc(3 * K).address == blocks[2].address
    assert a.malloc(2 * K).address == blocks[4].address
    assert a.malloc(5 * K).address == blocks[6].address
    assert a.malloc(7 * K).address == blocks[0].address
    assert a.reserved == 2 * MIB


def test_among_equals_the_lowest_address_is_taken():
    a, K = Allocator(), 64 * KIB
    blocks = carve(a, [2 * K, K, 2 * K, K, 2 * K, K], [4, 0, 2])
    assert [a.malloc(2 * K).address for _ in range(3)] == [blocks[i].address for i in (0, 2, 4)]


def test_best_fit_looks_across_segments():
    a = Allocator()
    first, second = a.malloc(30 * MIB), a.malloc(20 * MIB)
    a.free(first)
    a.free(second)
    assert a.malloc(19 * MIB).address == second.address and a.reserved == 50 * MIB


@pytest.mark.parametrize("order", ((1, 0), (0, 1), (0, 2, 1), (2, 0, 1), (0, 1, 2), (2, 1, 0)))
def test_neighbours_merge_when_they_are_freed(order):
    a, K = Allocator(), 64 * KIB
    blocks = carve(a, [2 * K, 3 * K, 4 * K, K], [])
    for i in order:
        a.free(blocks[i])
    free = sum((2 * K, 3 * K, 4 * K)[i] for i in order)
    rest = 2 * MIB - 10 * K
    kept = [] if len(order) == 3 else [(4 * K, True)]
    assert layout(a) == [[(free, False), *kept, (K, True), (rest, False)]]
    assert a.malloc(free).address == blocks[0].address


def test_freed_blocks_merge_with_the_rest_of_the_segment():
    a = Allocator()
    x, y = a.malloc(KIB), a.malloc(KIB)
    a.free(y)
    assert layout(a) == [[(KIB, True), (2 * MIB - KIB, False)]]
    a.free(x)
    assert layout(a) == [[(2 * MIB, False)]] and a.allocated == 0


def test_segments_never_merge():
    """Their addresses may follow each other: 2 x 10 MiB free are no room for 20."""
    a = Allocator()
    for block in [a.malloc(10 * MIB), a.malloc(10 * MIB)]:
        a.free(block)
    assert layout(a) == [[(10 * MIB, False)]] * 2
    a.malloc(20 * MIB)
    assert a.reserved == 40 * MIB


def test_segments_stay_and_are_used_again():
    a = Allocator()
    for size in (MIB, 5 * MIB, 50 * MIB) * 3:
        a.free(a.malloc(size))
    assert a.reserved == a.peak_reserved == 2 * MIB + 20 * MIB + 50 * MIB
    assert a.allocated == 0 and a.peak_allocated == 50 * MIB


def test_empty_cache_gives_back_segments_that_are_free_as_a_whole():
    a = Allocator()
    kept = a.malloc(KIB)
    for size in (5 * MIB, 50 * MIB):
        a.free(a.malloc(size))
    partly = a.malloc(30 * MIB)  # out of the 50
    a.empty_cache()
    assert a.reserved == 2 * MIB + 50 * MIB and a.peak_reserved == 72 * MIB
    a.free(partly)
    a.free(kept)
    a.empty_cache()
    a.empty_cache()
    assert (a.reserved, a.allocated, a.segments, a.pools) == (0, 0, [], {True: [], False: []})
    a.malloc(5 * MIB)  # nothing of what was given back is still believed to be there
    assert a.reserved == 20 * MIB


def test_freed_twice_is_an_error():
    a = Allocator()
    kept, block = a.malloc(KIB), a.malloc(KIB)
    a.free(block)
    with pytest.raises(AssertionError, match="twice"):
        a.free(block)
    assert a.allocated == kept.size


def test_peaks_stay_when_memory_is_freed():
    a = Allocator()
    a.free(a.malloc(40 * MIB))
    a.empty_cache()
    a.malloc(KIB)
    assert (a.peak_reserved, a.peak_allocated) == (40 * MIB, 40 * MIB)
    assert (a.reserved, a.allocated) == (2 * MIB, KIB)


def test_events_are_what_happened_in_order():
    a = Allocator()
    a.phase = "one"
    x = a.malloc(100)
    a.phase = "two"
    a.free(x)
    a.empty_cache()
    got = [(e.action, e.address, e.size, e.number, e.reserved, e.allocated, e.phase) for e in a.events]
    assert got == [
        ("segment_alloc", x.address, 2 * MIB, None, 2 * MIB, 0, "one"),
        ("alloc", x.address, 100, 0, 2 * MIB, 512, "one"),
        ("free_completed", x.address, 100, 0, 2 * MIB, 0, "two"),
        ("segment_free", x.address, 2 * MIB, None, 0, 0, "two"),
    ]


def test_equal_states_do_equal_things():
    """`state` is all that decides what later requests do; it is asked for often and must never be a stale one."""
    a = Allocator()
    x = a.malloc(3 * KIB)
    before = a.state()
    y = a.malloc(5 * KIB)
    assert a.state() != before
    a.free(y)
    assert a.state() == before
    a.free(x)
    assert a.state() != before  # free, and not in use
    a.empty_cache()
    assert a.state() == ()
    whole = a.malloc(12 * MIB)
    before = a.state()
    a.free(whole)  # nothing moves and nothing merges
    assert a.state() != before


# --- made-up sequences ---

SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, 3 * MIB),
    st.integers(MIB, 40 * MIB),
    st.sampled_from([512, MIB - 512, MIB, MIB + 1, 9 * MIB, 10 * MIB - 512, 10 * MIB, 19 * MIB, 20 * MIB, 21 * MIB]),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES),
        st.tuples(st.just("malloc"), SIZES),
        st.tuples(st.just("free"), st.integers(0, 99)),
        st.tuples(st.just("empty_cache"), st.just(0)),
    ),
    max_size=80,
)


class Naive:
    """The same rules written another way: a segment is the list of what is used in it, free is what lies between."""

    def __init__(self):
        self.segments: list[dict] = []
        self.peak_reserved = self.peak_allocated = 0

    @property
    def reserved(self) -> int:
        return sum(s["size"] for s in self.segments)

    @property
    def allocated(self) -> int:
        return sum(size for s in self.segments for _, size in s["used"])

    @staticmethod
    def gaps(segment: dict) -> list[tuple[int, int]]:
        at, found = 0, []
        for start, size in [*sorted(segment["used"]), (segment["size"], 0)]:
            if start > at:
                found.append((at, start - at))
            at = start + size
        return found

    def malloc(self, requested: int) -> tuple[dict, tuple[int, int]]:
        size = (requested + 511) // 512 * 512
        small = size <= 2**20
        fitting = [
            (room, s["number"], start, s)
            for s in self.segments
            if s["small"] == small
            for start, room in self.gaps(s)
            if room >= size
        ]
        if fitting:
            room, _, start, segment = min(fitting, key=lambda f: f[:3])
        else:
            two = 2 * 2**20
            room = two if small else 20 * 2**20 if size < 10 * 2**20 else (size + two - 1) // two * two
            number = 1 + max((s["number"] for s in self.segments), default=0)
            start, segment = 0, {"number": number, "size": room, "small": small, "used": []}
            self.segments.append(segment)
        rest = room - size
        if not (rest >= 512 if small else rest > 2**20):
            size = room
        segment["used"].append((start, size))
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return segment, (start, size)

    def free(self, block: tuple[dict, tuple[int, int]]) -> None:
        block[0]["used"].remove(block[1])

    def empty_cache(self) -> None:
        self.segments = [s for s in self.segments if s["used"]]


def check_invariants(a: Allocator) -> None:
    free, used, reserved, ranges = {True: [], False: []}, 0, 0, []
    for first in a.segments:
        blocks = list(a.blocks(first))
        assert first.before is None and blocks[-1].after is None
        for left, right in pairwise(blocks):
            assert left.after is right and right.before is left
            assert left.address + left.size == right.address  # they tile the segment
            assert left.number is not None or right.number is not None  # free neighbours have merged
        for block in blocks:
            assert block.size > 0 and block.size % 512 == 0 and block.pool is first.pool
            if block.number is None:
                free[first.pool is a.pools[True]].append((block.size, block.address, id(block)))
            else:
                assert block.size >= block.requested
                used += block.size
        size = blocks[-1].address + blocks[-1].size - first.address
        assert size % (2 * MIB) == 0
        reserved += size
        ranges.append((first.address, size))
    ranges.sort()
    assert all(start + size <= after for (start, size), (after, _) in pairwise(ranges))
    assert (a.reserved, a.allocated) == (reserved, used)
    assert a.peak_reserved >= reserved and a.peak_allocated >= used
    for small, pool in a.pools.items():
        assert [(size, address, id(block)) for size, address, block in pool] == sorted(free[small])
    numbers = [b.number for s in a.segments for b in a.blocks(s) if b.number is not None]
    assert len(numbers) == len(set(numbers))


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_any_sequence_keeps_the_books(steps):
    """Invariants after every step, and the bytes of a second model that is written another way."""
    a, naive, live = Allocator(), Naive(), []
    for action, value in steps:
        if action == "malloc":
            live.append((a.malloc(value), naive.malloc(value)))
        elif action == "free" and live:
            block, twin = live.pop(value % len(live))
            a.free(block)
            naive.free(twin)
        elif action == "empty_cache":
            a.empty_cache()
            naive.empty_cache()
        check_invariants(a)
        assert (a.reserved, a.allocated) == (naive.reserved, naive.allocated)
    assert (a.peak_reserved, a.peak_allocated) == (naive.peak_reserved, naive.peak_allocated)
    last = a.events[-1] if a.events else None
    assert last is None or (last.reserved, last.allocated) == (a.reserved, a.allocated)
    for block, _ in live:
        a.free(block)
    check_invariants(a)
    assert a.allocated == 0 and all(len(s) == 1 for s in layout(a))
    a.empty_cache()
    assert a.reserved == 0


@settings(max_examples=50, deadline=None)
@given(STEPS, st.lists(SIZES, min_size=1, max_size=5))
def test_equal_requests_from_an_equal_state_end_in_that_state(steps, sizes):
    """What loops leave out rests on this: once requests that are freed again change nothing, they never will."""
    a, live = Allocator(), []
    for action, value in steps:
        if action == "malloc":
            live.append(a.malloc(value))
        elif action == "free" and live:
            a.free(live.pop(value % len(live)))

    def turn():
        for block in [a.malloc(size) for size in sizes]:
            a.free(block)

    while True:
        before = a.state()
        turn()
        if a.state() == before:
            break
    peaks = a.peak_reserved, a.peak_allocated
    for _ in range(3):
        turn()
        assert a.state() == before and (a.peak_reserved, a.peak_allocated) == peaks


# --- cards ---


def test_every_card_is_plausible():
    assert set(COMMON) <= set(GPUS) and [GPUS[n].marketed_gb for n in COMMON] == sorted(GPUS[n].marketed_gb for n in COMMON)
    for name, gpu in GPUS.items():
        assert gpu.name == name and 0.9 * gpu.marketed_gb * 2**30 < gpu.visible < gpu.marketed_gb * 2**30
        assert gpu.usable == gpu.visible - CONTEXT > 0


def test_the_workspace_of_cublas_goes_by_the_capability():
    assert WORKSPACES == (8_519_680, 33_554_432)
    old, new = ("t4-16", "v100-32", "a100-80", "rtx4090"), ("h100", "h200", "b200", "rtx5090")
    assert {GPUS[n].workspace for n in old} == {8_519_680} and {GPUS[n].workspace for n in new} == {33_554_432}


@pytest.fixture
def card():
    return Card(GPUS["a100-80"])


def bytes_of(card: Card) -> Counter:
    """Requested bytes of the live blocks by category."""
    sums = Counter()
    for first in card.allocator.segments:
        for b in card.allocator.blocks(first):
            if b.number is not None:
                sums[card.categories[b.number]] += b.requested
    return sums


def test_a_tensor_takes_a_block_and_gives_it_back_when_it_dies(card):
    with simulated_cuda(card) as cuda:
        x = torch.empty(1000, dtype=torch.float32, device=cuda)
        assert card.allocator.allocated == 4096 and bytes_of(card) == {"activations": 4000}
        y = x + 1
        assert card.allocator.allocated == 2 * 4096
        del x
        assert card.allocator.allocated == 4096
        del y
        assert card.allocator.allocated == 0 and card.allocator.reserved == 2 * MIB and not card.live


def test_a_storage_lives_as_long_as_a_view_of_it(card):
    with simulated_cuda(card) as cuda:
        x = torch.empty(64, 100, device=cuda)
        row = x[3:5].t()
        del x
        assert bytes_of(card) == {"activations": 25600}
        del row
        assert card.allocator.allocated == 0


def test_views_in_place_and_out_take_nothing(card):
    with simulated_cuda(card) as cuda:
        x, out = (torch.empty(64, 64, device=cuda) for _ in range(2))
        count = card.allocator.count
        views = [x.view(32, 128), x.t(), x[1:3], x[None], x.narrow(0, 1, 2), *x.split(16), x.expand(2, 64, 64), x.detach()]
        x.add_(1).mul_(out).zero_().exponential_()
        x[:, 3] = out[0]
        x[0].copy_(out[1])
        torch.add(x, 1, out=out)
        torch.amax(x, -1, keepdim=True, out=out.view(-1)[:64].view(64, 1))
        assert card.allocator.count == count
        torch.mm(x, x, out=out)
        assert bytes_of(card) == {"activations": 2 * 64 * 64 * 4, "workspace": 8_519_680}  # the first product of matrices
        torch.bmm(x[None], x[None], out=out[None])
        torch.baddbmm(out[None], x[None], x[None], out=out[None])
        assert card.allocator.count == count + 1
        del views


def test_assigning_a_number_takes_nothing(card):
    """Python's assignment to a tensor of a card fills it; the number never gets memory there."""
    with simulated_cuda(card) as cuda:
        x = torch.empty(64, 64, device=cuda)
        x[:, 3] = 2
        x[1] = 0.5
    assert card.allocator.count == 1


def test_an_operator_with_several_results_takes_a_block_for_each(card):
    with simulated_cuda(card) as cuda:
        x = torch.empty(1000, device=cuda)
        values, indices = torch.topk(x, 10)
        assert card.allocator.count == 3 and card.allocator.allocated == 4096 + 2 * 512
        del indices
        assert card.allocator.allocated == 4096 + 512


def test_tensors_of_the_host_are_not_counted(card):
    with simulated_cuda(card) as cuda:
        x = torch.ones(1000) * 2
        assert card.allocator.count == 0
        y = x.to(cuda)
        assert bytes_of(card) == {"activations": 4000}
        y.to("cpu")
        y.to(cuda)  # where it is already
        assert card.allocator.count == 1


def test_empty_tensors_take_no_block(card):
    with simulated_cuda(card) as cuda:
        x = torch.empty(0, 5, device=cuda)
        assert card.allocator.count == 0 and x.device == cuda


@pytest.mark.parametrize("name, workspace", (("a100-80", 8_519_680), ("t4-16", 8_519_680), ("h100", 33_554_432)))
def test_cublas_takes_its_workspace_once(name, workspace):
    card = Card(GPUS[name])
    with simulated_cuda(card) as cuda:
        x, w = torch.empty(4, 64, device=cuda), torch.empty(64, 64, device=cuda)
        torch.mm(torch.empty(4, 4), torch.empty(4, 4))  # on the host
        (x * 2).sum()
        assert "workspace" not in bytes_of(card)
        torch.nn.functional.linear(x, w)
        assert bytes_of(card)["workspace"] == workspace
        x @ w
        torch.bmm(x[None], w[None])
        assert bytes_of(card)["workspace"] == workspace
    assert Counter(card.categories)["workspace"] == 1
    del x, w
    assert card.allocator.allocated == workspace  # it stays


@pytest.mark.parametrize("product", ("mm", "bmm", "addmm", "baddbmm", "linear", "linear of 3 dimensions"))
def test_every_product_of_matrices_takes_the_workspace(card, product):
    with simulated_cuda(card) as cuda:
        x, b = torch.empty(8, 8, device=cuda), torch.empty(8, device=cuda)
        {
            "mm": lambda: x @ x,
            "bmm": lambda: torch.bmm(x[None], x[None]),
            "addmm": lambda: torch.addmm(b, x, x),
            "baddbmm": lambda: torch.baddbmm(x[None], x[None], x[None]),
            "linear": lambda: torch.nn.functional.linear(x, x, b),
            "linear of 3 dimensions": lambda: torch.nn.functional.linear(x[None], x),
        }[product]()
    assert Counter(card.categories)["workspace"] == 1


def test_names_and_scopes(card):
    with simulated_cuda(card) as cuda:
        card.scope = "loading"
        kept, passing = (torch.empty(100, dtype=torch.uint8, device=cuda) for _ in range(2))
        card.name("weights", [kept[10:], torch.empty(5)])  # of a view its storage; nothing of the host
        card.scope = "activations"
        later = torch.empty(7, dtype=torch.uint8, device=cuda)
        assert bytes_of(card) == {"weights": 100, "loading": 100, "activations": 7}
        card.name("KV cache", [kept])
        assert bytes_of(card) == {"KV cache": 100, "loading": 100, "activations": 7}
        del passing, later


def test_the_moment_of_the_peak(card):
    """The bytes by category when the last segment was made, the block it was made for included; later events are not."""
    with simulated_cuda(card) as cuda:
        card.phase, card.scope = "load", "loading"
        x = torch.empty(30 * MIB, dtype=torch.uint8, device=cuda)
        card.name("weights", [x])
        gone = torch.empty(30 * MIB, dtype=torch.uint8, device=cuda)
        del gone
        card.phase, card.scope = "prefill", "activations"
        y = torch.empty(31 * MIB + 5, dtype=torch.uint8, device=cuda)
        card.phase = "decode"
        z = torch.empty(30 * MIB, dtype=torch.uint8, device=cuda)
    event, sums = card.at_peak()
    assert event.phase == "prefill" and event.reserved == 92 * MIB
    assert sums == {"weights": 30 * MIB, "activations": 31 * MIB + 512}
    del x, y, z


def test_a_tensor_on_the_wrong_device_is_an_error(card):
    with simulated_cuda(card) as cuda, pytest.raises(RuntimeError, match="device"):
        torch.empty(3, device=cuda) + torch.empty(3)


# --- what loops leave out ---


def visited(card: Card, items, key, body=lambda item: None, memo=None) -> list:
    seen = []
    for item in card.distinct(items, key, memo):
        seen.append(item)
        body(item)
    return seen


def first_letter(item: str) -> str | None:
    return None if item[0] == "-" else item[0]


def test_equal_items_are_left_out_once_one_changed_nothing(card):
    assert visited(card, ["a1", "a2", "b1", "a3", "b2", "c1"], first_letter) == ["a1", "b1", "c1"]


def test_an_item_that_changed_something_is_no_reason_to_leave_others_out(card):
    kept = []

    def body(item):
        if item in ("a1", "a2"):
            kept.append(card.allocator.malloc(100))
        else:
            card.allocator.free(card.allocator.malloc(100))

    assert visited(card, ["a1", "a2", "a3", "a4", "a5"], first_letter, body) == ["a1", "a2", "a3"]


def test_the_first_of_a_new_segment_settles_with_the_second(card):
    """The segment of the first stays: only the second finds and leaves the same."""
    body = lambda item: card.allocator.free(card.allocator.malloc(100))  # noqa: E731
    assert visited(card, ["a1", "a2", "a3", "a4"], first_letter, body) == ["a1", "a2"]


def test_what_changed_something_is_not_settled_by_going_back(card):
    """The state is the one that the first of them found, but they do change it."""
    card.allocator.free(card.allocator.malloc(100))
    kept = []

    def body(item):
        if item == "-1":
            card.allocator.free(kept.pop())
        else:
            kept.append(card.allocator.malloc(100))

    assert visited(card, ["a1", "-1", "a2", "-1", "a3"], first_letter, body) == ["a1", "-1", "a2", "-1", "a3"]


def test_a_key_of_none_is_never_left_out(card):
    assert visited(card, ["a1", "-1", "a2", "-2", "-3"], first_letter) == ["a1", "-1", "-2", "-3"]


def test_a_changed_allocator_unsettles(card):
    kept = []

    def body(item):
        if item == "-1":
            kept.append(card.allocator.malloc(100))

    assert visited(card, ["a1", "a2", "-1", "a3", "a4"], first_letter, body) == ["a1", "-1", "a3"]
    card.allocator.free(kept.pop())
    assert visited(card, ["a5", "a6"], first_letter) == ["a5"]  # each loop learns anew


def test_what_was_learned_goes_from_loop_to_loop(card):
    memo = {}
    assert visited(card, ["a1", "a2"], first_letter, memo=memo) == ["a1"]
    assert visited(card, ["a3", "b1"], first_letter, memo=memo) == ["b1"]
    block = card.allocator.malloc(100)
    assert visited(card, ["a4", "a5"], first_letter, memo=memo) == ["a4"]
    card.allocator.free(block)
    assert visited(card, ["a6", "a7"], first_letter, memo=memo) == ["a6"]  # a segment is there that was not


def test_without_jump_nothing_is_left_out():
    card = Card(GPUS["a100-80"], jump=False)
    items = ["a1", "a2", "a3", "-1"]
    assert visited(card, items, first_letter) == items and visited(card, items, first_letter, memo={}) == items
    assert [card.repeats(states) for states in [set()] for _ in range(3)] == [False] * 3


def test_real_memory_leaves_nothing_out():
    items = ["a1", "a2", "a3"]
    assert list(Watch().distinct(items, first_letter)) == items


def test_a_state_seen_before_repeats(card):
    states = set()
    assert not card.repeats(states)
    block = card.allocator.malloc(100)
    assert not card.repeats(states)
    other = card.allocator.malloc(100)
    assert not card.repeats(states)
    card.allocator.free(other)
    assert card.repeats(states) and not card.repeats(set())
    card.allocator.free(block)
    assert not card.repeats(states)  # free as at the start, but the segment is there


def test_layers_that_differ_are_all_visited(card):
    """One layer in float among quantized ones has another key than they."""
    layers = torch.nn.ModuleList(torch.nn.Linear(4, n) for n in (4, 4, 5, 4, 5))
    repeated = Repeated(layers, card)
    assert [layer.out_features for layer in repeated] == [4, 5]
    card.jump = False
    assert list(repeated) == list(layers) and len(repeated) == 5


def test_empty_cache_is_of_the_card_that_is_watched(card):
    card.allocator.free(card.allocator.malloc(MIB))
    memory.empty_cache(torch.device("cpu"), Watch())
    assert card.allocator.reserved == 2 * MIB
    memory.empty_cache(torch.device("cuda:0"), card)
    assert card.allocator.reserved == 0


# --- snapshots ---


@pytest.fixture
def recorded(card):
    """A card on which something of every kind happened, and what lives on it."""
    with simulated_cuda(card) as cuda:
        card.phase, card.scope = "load", "loading"
        weights = torch.empty(3 * MIB, 2, dtype=torch.bfloat16, device=cuda)
        torch.empty(24 * MIB, dtype=torch.uint8, device=cuda)
        memory.empty_cache(cuda, card)
        card.name("weights", [weights])
        card.phase, card.scope = "decode", "activations"
        x = torch.empty(300, 2, dtype=torch.bfloat16, device=cuda)
        y = torch.nn.functional.linear(x, weights[:70])
        x = y * 2
        torch.empty(40 * MIB, dtype=torch.uint8, device=cuda)
        card.scope = "logits and sampling"
        x.float()
    return card, (weights, x, y)


def test_a_snapshot_tells_the_same_story(recorded):
    card, _ = recorded
    snapshot = simulated_snapshot(card)
    (events,) = snapshot["device_traces"]
    a = card.allocator
    assert [(e["action"], e["addr"], e["size"]) for e in events] == [(e.action, e.address, e.size) for e in a.events]
    assert [e["time_us"] for e in events] == sorted({e["time_us"] for e in events})
    assert {e["action"] for e in events} == {"alloc", "free_completed", "segment_alloc", "segment_free"}
    reserved = peak_reserved = allocated = peak_allocated = 0
    for e in events:
        rounded = -(-e["size"] // 512) * 512
        reserved += {"segment_alloc": e["size"], "segment_free": -e["size"]}.get(e["action"], 0)
        allocated += {"alloc": rounded, "free_completed": -rounded}.get(e["action"], 0)
        peak_reserved, peak_allocated = max(peak_reserved, reserved), max(peak_allocated, allocated)
    assert (peak_reserved, peak_allocated) == (a.peak_reserved, a.peak_allocated)
    assert (reserved, allocated) == (a.reserved, a.allocated)
    assert sum(s["total_size"] for s in snapshot["segments"]) == a.reserved
    assert sum(s["allocated_size"] for s in snapshot["segments"]) == a.allocated
    assert "simulated" in snapshot["source"] and "a100-80" in snapshot["source"]


def test_every_event_of_a_snapshot_has_a_category(recorded):
    """A free has that of what it frees. torch's viewer wants one of them to be "unknown"."""
    card, _ = recorded
    events = simulated_snapshot(card)["device_traces"][0]
    kinds = Counter((e["action"], e["category"]) for e in events)
    assert {c for a, c in kinds if a == "alloc"} == {"weights", "loading", "workspace", "activations", "logits and sampling"}
    assert {c for a, c in kinds if a.startswith("segment")} == {"unknown"}
    live = {}
    for e in events:
        if e["action"] == "alloc":
            live[e["addr"]] = e["category"]
        elif e["action"] == "free_completed":
            assert live.pop(e["addr"]) == e["category"]
    assert sorted(live.values()) == ["activations", "activations", "weights", "workspace"]


def test_torchs_own_reader_takes_a_snapshot(recorded, tmp_path):
    card, _ = recorded
    write_snapshot(tmp_path / "s.pickle", simulated_snapshot(card))
    data = (tmp_path / "s.pickle").read_bytes()
    assert data[:2] == b"\x80\x04"  # the protocol: the viewer's page reads no newer one
    snapshot = pickle.loads(data)
    a = card.allocator
    text = _memory_viz.segsum(snapshot)
    assert f"total_reserved: {a.reserved / MIB:.1f}MiB" in text
    assert f"total_allocated: {sum(bytes_of(card).values()) / MIB:.1f}MiB" in text
    assert f"segments: {len(a.segments)}\n" in text
    text = _memory_viz.trace(snapshot)
    assert f"{len(a.events)} entries" in text and "24.0MiB" in text and "40.0MiB" in text and "cudaMalloc" in text
    assert len(_memory_viz.trace_plot(snapshot)) > 1000
    assert len(_memory_viz.segment_plot(snapshot)) > 1000
