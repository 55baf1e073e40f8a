"""What a memory allocator did, as a file: of the simulated card, of a real one, or of a CPU.

One format, that of `torch.cuda.memory._snapshot`, so torch's own viewer reads it; every event carries a `category` besides,
and the file a `source`. `scripts/plot_memory.py` draws it without a network.
"""

import bisect
import os
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from memory import WORKSPACES, Block, Card, Watch


def simulated_snapshot(card: Card) -> dict:
    """What the simulated card did."""
    a = card.allocator
    events = [
        dict(action=e.action, addr=e.address, size=e.size, stream=0, time_us=i, frames=[], pool_id=(0, 0), phase=e.phase,
             category="unknown" if e.number is None else card.categories[e.number])
        for i, e in enumerate(a.events)
    ]  # fmt: skip
    segments = []
    for first in a.segments:
        blocks, kind = list(a.blocks(first)), "small" if first.pool is a.pools[True] else "large"
        used = sum(b.size for b in blocks if b.number is not None)
        segments.append(
            dict(address=first.address, total_size=sum(b.size for b in blocks), stream=0, segment_type=kind, device=0,
                 segment_pool_id=(0, 0), allocated_size=used, active_size=used, requested_size=used, is_expandable=False,
                 frames=[], blocks=[_block(b) for b in blocks])
        )  # fmt: skip
    return _snapshot(segments, events, f"simulated {card.gpu.name}")


def _block(b: Block) -> dict:
    used = b.number is not None
    state = "active_allocated" if used else "inactive"
    return dict(address=b.address, size=b.size, requested_size=b.requested if used else b.size, state=state, frames=[])


def _snapshot(segments: list[dict], events: list[dict], source: str) -> dict:
    return {"segments": segments, "device_traces": [events], "allocator_settings": {}, "source": source}


def cpu_snapshot(profiler: torch.profiler.profile, watch: "Recorder") -> dict:
    """What torch's CPU allocator did while the profiler ran with `profile_memory` and `with_stack`."""
    found, open_ = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while open_:
        e = open_.pop()
        open_.extend(e.children)
        if e.tag == torch._C._profiler._EventType.Allocation and e.extra_fields.device.type == "cpu":
            found.append(e)
    events = []
    for e in sorted(found, key=lambda e: e.start_time_ns):
        functions, at = [], e.parent
        while at is not None:
            functions.append(at.name.rpartition(" ")[2])
            at = at.parent
        size, action = e.extra_fields.alloc_size, ("alloc" if e.extra_fields.alloc_size > 0 else "free_completed")
        events.append(dict(action=action, addr=e.extra_fields.ptr, size=abs(size), stream=0, time_us=e.start_time_ns // 1000,
                           frames=[], category=category_of(functions)))  # fmt: skip
    return _snapshot([], name_events(events, watch), "cpu")


def cuda_snapshot(device: torch.device, watch: "Recorder") -> dict:
    """What torch's allocator on a card did since `_record_memory_history`, with categories and phases."""
    snapshot = torch.cuda.memory._snapshot()
    for events in snapshot["device_traces"]:
        for e in events:
            functions = [frame["name"] for frame in e.get("frames", [])]
            e["category"] = category_of(functions) if e["action"] == "alloc" else "unknown"
        name_events(events, watch)
    return snapshot | {"source": torch.cuda.get_device_name(device)}


def category_of(functions: list[str]) -> str:
    """What is allocated below these functions of ours, unless it turns out to be kept."""
    if {"sample", "logits_to_probs", "logits"} & set(functions):
        return "logits and sampling"
    return "loading" if "load_weights" in functions else "activations"


def name_events(events: list[dict], watch: "Recorder") -> list[dict]:
    """Give what `watch` names its category: the last allocation at that address which is large enough. (It may have been
    freed by now, with the model.) A free takes the category of its allocation. Every event gets its phase."""
    since = [begin for begin, _ in watch.phases]
    for e in events:
        if "time_us" in e:
            e["phase"] = watch.phases[max(bisect.bisect(since, e["time_us"]) - 1, 0)][1]
    names = {address: (size, category) for category, kept in watch.held.items() for address, size in kept}
    for e in reversed(events):
        if e["action"] == "alloc" and e["addr"] in names and e["size"] >= names[e["addr"]][0]:
            e["category"] = names.pop(e["addr"])[1]
    live = {}
    for e in events:
        if e["action"] == "alloc":
            live[e["addr"]] = e
        elif e["action"] == "free_completed":
            freed = live.pop(e["addr"], None)
            e["category"] = freed["category"] if freed else "unknown"
    for e in live.values():
        if e["category"] == "activations" and e["size"] in WORKSPACES:
            e["category"] = "workspace"
    return events


class Recorder(Watch):
    """Records what is allocated on a device from now on into a file (`path`; None: only watches), to be written at the end
    or when memory runs out."""

    def __init__(self, path: str | None, device: torch.device):
        super().__init__()
        self.path, self.device, self.profiler = path, device, None
        self.phases = [(time.time_ns() // 1000, "start")]  # since when, in microseconds

    @property
    def phase(self) -> str:
        return self.phases[-1][1]

    @phase.setter
    def phase(self, phase: str) -> None:
        self.phases.append((time.time_ns() // 1000, phase))

    def __enter__(self) -> "Recorder":
        if self.path and self.device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=10**6, context="alloc", stacks="python")
        elif self.path:
            activities = [torch.profiler.ProfilerActivity.CPU]
            self.profiler = torch.profiler.profile(activities=activities, profile_memory=True, with_stack=True)
            with quiet():
                self.profiler.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        written = None
        if self.path:
            try:
                self.write(self.path)
                written = f"memory profile: {self.path}"
            except (OSError, RuntimeError, MemoryError) as e:
                if error is None:
                    raise
                written = f"the memory profile could not be written ({' '.join(str(e).split())[:100]})"
        if error is not None and is_out_of_memory(error):
            raise OSError("; ".join(filter(None, (self.explain(error), written)))) from None

    def write(self, path: str) -> None:
        if self.profiler:
            with quiet():
                self.profiler.stop()
            write_snapshot(path, cpu_snapshot(self.profiler, self))
        else:
            write_snapshot(path, cuda_snapshot(self.device, self))
            torch.cuda.memory._record_memory_history(enabled=None)

    def explain(self, error: BaseException) -> str:
        sums = {category: sum(size for _, size in storages) / 1e9 for category, storages in self.held.items()}
        held = ", ".join(f"{category} {gb:.2f} GB" for category, gb in sums.items() if gb >= 0.005) or "nothing that is kept"
        if self.device.type == "cuda":
            reserved, free = torch.cuda.memory_reserved(self.device) / 1e9, torch.cuda.mem_get_info(self.device)[0] / 1e9
            held += f"; {reserved:.2f} GB reserved in all, {free:.2f} GB free on the card"
        return (
            f"out of memory in phase '{self.phase}', holding {held} ({' '.join(str(error).split())[:200]}); "
            "--dry_run shows what a run takes"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Also what CUDA and cuBLAS raise where they take memory beside torch's allocator."""
    words = ("DefaultCPUAllocator", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    by_text = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return by_text or isinstance(error, torch.OutOfMemoryError | MemoryError)


def write_snapshot(path: str, snapshot: dict) -> None:
    """The whole file or none."""
    partial = f"{path}.partial"
    try:
        with open(partial, "wb") as f:
            pickle.dump(snapshot, f, protocol=4)
        os.replace(partial, path)
    except OSError as e:
        with suppress(OSError):
            os.unlink(partial)
        raise OSError(f"--memory_profile {path}: {e.strerror}") from None


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch's profiler itself writes to stderr when it starts and stops."""
    try:
        stderr, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    except OSError:  # closed: nobody reads it
        yield
        return
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nothing)
