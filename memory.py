"""The memory of a CUDA card, without a card: a model of torch's caching allocator, and a mode that runs the program on fake
tensors (they know device, shape and dtype, and hold no data) and gives every storage a block of it. Knows no model.

The allocator's rules are those of torch's native backend at its default settings (c10/cuda/CUDACachingAllocator.cpp);
`tests/data/alloc_traces` calibrates them against peaks that were published from a real card. What a CUDA kernel allocates
inside itself (the temporary storage of a sort, say) is not seen. Sizes are bytes; GB = 1e9 bytes.
"""

import bisect
import signal
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")
MIB = 2**20
CONTEXT = 600 * 10**6  # of a card's bytes: what a process's CUDA context takes at most (0.3 to 0.6e9), not seen by torch


# --- the allocator ---


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment. `number` counts allocations: it names what the block holds, or held."""

    address: int
    size: int
    pool: list
    requested: int = 0
    number: int | None = None  # None: free
    before: "Block | None" = None
    after: "Block | None" = None


@dataclass(frozen=True, slots=True)
class Event:
    """One step of the allocator. `action` is torch's word; reserved and allocated are the sums after it."""

    action: str
    address: int
    size: int
    number: int | None
    reserved: int
    allocated: int
    phase: str


class Allocator:
    """torch's CUDA caching allocator: sizes are rounded to 512 bytes; up to 1 MiB come out of segments of 2 MiB; more out
    of segments of 20 MiB, or from 10 MiB on of their own size rounded up to 2 MiB. The best fit by (size, address) is
    split where what is left is worth it; neighbours merge when they are freed; segments stay until `empty_cache`."""

    def __init__(self):
        self.segments: list[Block] = []  # the first block of each
        self.pools: dict[bool, list] = {True: [], False: []}  # small or not: free blocks as sorted (size, address, block)
        self.reserved = self.allocated = self.count = 0
        self.peak_reserved = self.peak_allocated = 0
        self.next_address = 2**40
        self.events: list[Event] = []
        self.phase = "start"
        self._state: tuple | None = None

    def malloc(self, requested: int) -> Block:
        size = -(-requested // 512) * 512
        small = size <= MIB
        pool = self.pools[small]
        at = bisect.bisect_left(pool, (size, 0))
        block = pool.pop(at)[2] if at < len(pool) else self._segment(size, small, pool)
        if block.size - size >= 512 if small else block.size - size > MIB:
            rest = Block(block.address + size, block.size - size, pool, before=block, after=block.after)
            if rest.after:
                rest.after.before = rest
            block.size, block.after = size, rest
            self._keep(rest)
        block.requested, block.number = requested, self.count
        self.count += 1
        self.allocated += block.size  # the whole block, where the rest was not worth splitting off
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self._log("alloc", block.address, requested, block.number)
        return block

    def free(self, block: Block) -> None:
        assert block.number is not None, "freed twice"
        number, block.number = block.number, None
        self.allocated -= block.size
        self._log("free_completed", block.address, block.requested, number)
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.number is None:
                del block.pool[bisect.bisect_left(block.pool, (neighbour.size, neighbour.address))]
                first, second = sorted((block, neighbour), key=lambda b: b.address)
                first.size, first.after = first.size + second.size, second.after
                if first.after:
                    first.after.before = first
                block = first
        self._keep(block)

    def empty_cache(self) -> None:
        """Give back the segments that are free as a whole."""
        for block in [s for s in self.segments if s.number is None and s.after is None]:
            block.pool.remove((block.size, block.address, block))
            self.segments.remove(block)
            self.reserved -= block.size
            self._log("segment_free", block.address, block.size)

    def blocks(self, segment: Block) -> Iterator[Block]:
        block = segment
        while block is not None:
            yield block
            block = block.after

    def state(self) -> tuple:
        """Where every block lies and which are free: all that decides what later requests do."""
        if self._state is None:
            self._state = tuple((b.address, b.size, b.number is None) for first in self.segments for b in self.blocks(first))
        return self._state

    def _segment(self, size: int, small: bool, pool: list) -> Block:
        size = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        block = Block(self.next_address, size, pool)
        self.next_address += size
        self.segments.append(block)
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._log("segment_alloc", block.address, size)
        return block

    def _keep(self, block: Block) -> None:
        bisect.insort(block.pool, (block.size, block.address, block))

    def _log(self, action: str, address: int, size: int, number: int | None = None) -> None:
        self._state = None
        self.events.append(Event(action, address, size, number, self.reserved, self.allocated, self.phase))


# --- cards ---

WORKSPACES = (8 * MIB + 128 * 1024, 32 * MIB)  # of cuBLAS: below compute capability 9.0, and from there on


@dataclass(frozen=True)
class Gpu:
    """A card. `visible` is what torch reports as its total memory, less than the marketed size (rounded down from what
    out-of-memory messages in public reports show)."""

    name: str
    marketed_gb: int
    visible: int
    capability: tuple[int, int]

    @property
    def usable(self) -> int:
        return self.visible - CONTEXT

    @property
    def workspace(self) -> int:
        """What cuBLAS takes once, through the allocator, per stream."""
        return WORKSPACES[self.capability >= (9, 0)]


GPUS = {
    name: Gpu(name, marketed, int(gib * 2**30), capability)
    for name, marketed, gib, capability in (
        ("rtx4060-8", 8, 7.63, (8, 9)), ("rtx3060-12", 12, 11.63, (8, 6)), ("rtx4070-12", 12, 11.60, (8, 9)),
        ("t4-16", 16, 14.56, (7, 5)), ("v100-16", 16, 15.77, (7, 0)), ("rtx4060ti-16", 16, 15.60, (8, 9)),
        ("rtx4080-16", 16, 15.60, (8, 9)), ("rtx3090", 24, 23.57, (8, 6)), ("rtx4090", 24, 23.52, (8, 9)),
        ("l4-24", 24, 22.03, (8, 9)), ("a10-24", 24, 22.06, (8, 6)), ("v100-32", 32, 31.73, (7, 0)),
        ("rtx5090", 32, 31.36, (12, 0)), ("a100-40", 40, 39.38, (8, 0)), ("a6000-48", 48, 47.40, (8, 6)),
        ("l40s-48", 48, 44.40, (8, 9)), ("a100-80", 80, 79.14, (8, 0)), ("h100", 80, 79.11, (9, 0)),
        ("h200", 141, 139.70, (9, 0)), ("b200", 180, 178.30, (10, 0)),
    )
}  # fmt: skip
# one card of each common size, for "does it fit"
COMMON = ("rtx4060-8", "rtx3060-12", "rtx4060ti-16", "rtx4090", "rtx5090", "a100-40", "l40s-48", "h100", "h200")


# --- the simulated device ---


class _Indexing(TorchFunctionMode):
    """A CPU build refuses Python indexing, assignment and `copy_` on fake CUDA tensors ("not linked with support for cuda
    devices"): those three are answered with the aten operators that they stand for."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            return _index(*args)
        if func is torch.Tensor.__setitem__:
            target, index, value = args
            view = _index(target, index)
            torch.ops.aten.copy_(view, value) if isinstance(value, torch.Tensor) else torch.ops.aten.fill_(view, value)
            return None
        if func is torch.Tensor.copy_:
            return torch.ops.aten.copy_(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _index(x, index):
    """x[index] for integers, slices, None and Ellipsis."""
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in index:
        at, taken = index.index(Ellipsis), sum(i is not None for i in index) - 1
        index = index[:at] + (slice(None),) * (x.dim() - taken) + index[at + 1 :]
    dim = 0
    for i in index:
        if i is None:
            x = torch.ops.aten.unsqueeze(x, dim)
        elif isinstance(i, int):
            x, dim = torch.ops.aten.select(x, dim, i), dim - 1
        elif isinstance(i, slice):
            x = torch.ops.aten.slice(x, dim, i.start, i.stop, i.step or 1)
        else:
            raise NotImplementedError(f"indexing with {type(i).__name__} is not simulated")
        dim += 1
    return x


MATMULS = (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm)


class Watch:
    """Where a program is (`phase`) and what it keeps (`name`), for messages and pictures. A simulated card also lets loops
    leave out what cannot change the peak (`distinct`)."""

    phase = "start"

    def __init__(self):
        self.held: dict[str, list[tuple[int, int]]] = {}  # by category: (address, bytes) of every storage

    def name(self, category: str, tensors: Iterable[Tensor]) -> None:
        """These tensors are kept, and all that counts as `category`."""
        self.held[category] = [(s.data_ptr(), s.nbytes()) for s in (t.untyped_storage() for t in tensors)]

    def distinct(self, items: Iterable[T], key: Callable[[T], Hashable], memo: dict | None = None) -> Iterator[T]:
        """All items: on real memory nothing is left out."""
        return iter(items)

    def repeats(self, states: set) -> bool:
        """Whether the rest of a loop is known; on real memory it never is."""
        return False


class Card(Watch, TorchDispatchMode):
    """Gives every storage that an operator returns on the simulated device a block of the allocator, until it dies. What
    an operator allocates inside is invisible: ours allocate nothing but their result. `scope` names what is allocated
    from now on. `jump=False`: leave nothing out."""

    def __init__(self, gpu: Gpu, jump: bool = True):
        TorchDispatchMode.__init__(self)
        self.gpu, self.jump, self.allocator = gpu, jump, Allocator()
        self.device = torch.device("cuda:0")
        self.scope = "activations"
        self.live: dict[int, tuple[weakref.ref, Block]] = {}  # by storage
        self.categories: list[str] = []  # by the number of the allocation
        self.has_workspace = self.interrupted = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor) and t.device.type == "cuda":
                self._take(t.untyped_storage())
        if not self.has_workspace and func.overloadpacket in MATMULS and out.device.type == "cuda":
            self.has_workspace = True
            self.allocator.malloc(self.gpu.workspace)
            self.categories.append("workspace")
        return out

    def _take(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.live and storage.nbytes():
            block = self.allocator.malloc(storage.nbytes())
            self.live[key] = weakref.ref(storage, lambda _: self.allocator.free(self.live.pop(key)[1])), block
            self.categories.append(self.scope)

    @property
    def phase(self) -> str:
        return self.allocator.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self.allocator.phase = phase

    def name(self, category, tensors):
        for t in tensors:
            if (entry := self.live.get(t.untyped_storage()._cdata)) is not None:
                self.categories[entry[1].number] = category

    def distinct(self, items, key, memo=None):
        """The items, less those that can change nothing: once an item has left the allocator just as it found it, items of
        the same key are left out as long as the allocator is in that state, since equal requests from an equal state do
        equal things. A key of None is never left out. `memo` carries what was learned from one loop to the next."""
        memo = {} if memo is None else memo
        for item in items:
            if self.interrupted:
                raise KeyboardInterrupt
            name, before = key(item), self.allocator.state()
            if self.jump and name is not None and memo.get(name) == before:
                continue
            yield item
            if before == self.allocator.state():
                memo[name] = before

    def repeats(self, states: set) -> bool:
        """Whether the allocator was in this state before, at the same place of a loop whose steps are equal: what follows
        is known then."""
        known = self.allocator.state() in states
        states.add(self.allocator.state())
        return self.jump and known

    def at_peak(self) -> tuple[Event, dict[str, int]]:
        """The allocation that took the reserved bytes to their peak, and the bytes allocated then by category."""
        a, live = self.allocator, {}
        top = next(i for i, e in enumerate(a.events) if e.reserved == a.peak_reserved)
        for e in a.events[: top + 2]:  # the new segment, and the block for which it was made
            if e.action == "alloc":
                live[e.number] = e.size
            elif e.action == "free_completed":
                del live[e.number]
        sums: dict[str, int] = {}
        for number, size in live.items():
            category = self.categories[number]
            sums[category] = sums.get(category, 0) + -(-size // 512) * 512
        return a.events[top], sums


class Repeated(nn.ModuleList):
    """Layers of which a loop visits only those that can change the card's memory."""

    def __init__(self, layers: nn.ModuleList, card: Card):
        super().__init__(layers)
        self.card = card
        parts = {layer: layer.state_dict(keep_vars=True) for layer in layers}
        self.kinds = {layer: tuple((n, t.shape, t.dtype) for n, t in state.items()) for layer, state in parts.items()}

    def __iter__(self):
        return self.card.distinct(super().__iter__(), self.kinds.__getitem__)


def empty_cache(device: torch.device, watch: Watch) -> None:
    """Give cached memory back to the card, the simulated or the real one."""
    if isinstance(watch, Card):
        watch.allocator.empty_cache()
    elif device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def held_interrupts(card: Card) -> Iterator[None]:
    """Ctrl-C in the midst of torch's dispatch modes can end the process with an error of C++: it is kept for the next turn
    of one of the card's loops."""

    def keep(signal_number, frame):
        card.interrupted = True

    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
        yield
        return
    signal.signal(signal.SIGINT, keep)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if card.interrupted:
        raise KeyboardInterrupt


@contextmanager
def simulated_cuda(card: Card | None = None) -> Iterator[torch.device]:
    """Within it, tensors are fake, and device "cuda:0" exists; a tensor on the wrong device is an error as on a card. The
    index is needed: plain "cuda" fails in a CPU build. `card` counts what is allocated there."""
    with ExitStack() as stack:
        if card is not None:
            stack.enter_context(held_interrupts(card))
        stack.enter_context(FakeTensorMode())
        if card is not None:
            stack.enter_context(card)
        stack.enter_context(_Indexing())
        yield torch.device("cuda:0")
