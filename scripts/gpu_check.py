"""Checks what only a CUDA card can show, on random weights and in under five minutes: python scripts/gpu_check.py

Parts print what they find as it comes, then a table; the exit status is 1 if one failed. Without a card all of them run at
small sizes on the CPU: that tests this script, and says nothing about a card.
"""

import argparse
import gc
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch._dynamo.utils import counters

# A script's own folder is on the path, not the repository's root, where the modules stand.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import predict
from attention import BLOCK, KV_CACHES, PREFILL_ROWS, round_up, scratch_bytes
from checkpoint import random_model
from generate import (
    DEFAULT_GPU,
    Sampling,
    Steps,
    build_parser,
    compile_steps,
    find_model,
    generate,
    prefill,
    read_tokens,
    rehearse,
    set_up,
    warm_up,
)
from inputs import fit_lengths, prompt_ids
from measure import commit, device_name, synchronize
from memory import CONTEXT, GPUS, MIB, Gpu, Watch
from model import ModelArgs, Transformer, causal_triangle, prefill_plan, rope_table
from snapshot import Recorder, simulated_snapshot, write_snapshot

TOTAL_S = 280  # for all parts together; one that is compiling when its time ends runs a little over
GREEDY = Sampling(temperature=0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPERATOR_LIMITS = {FP32: 3e-6, BF16: 5e-3, FP16: 1e-3}  # ||out - ref|| / ||ref||
COMPILED_LIMITS = {FP32: 1e-4, BF16: 5e-2, FP16: 6e-3}  # the same of logits: a compiled graph rounds at other places
PEAK_LIMIT = 0.02  # of the measured peak, for the predicted one: what a kernel allocates inside itself is not simulated
INT8_LIMIT = 0.015  # what 8 bits may change in stored values; a plain cache only rounds to its dtype


@dataclass(frozen=True)
class Place:
    """Where the parts run, and so how large everything is; and the folder for memory snapshots, if they are kept."""

    device: torch.device
    card: bool
    out: Path | None = None

    def pick(self, on_card, on_cpu):
        return on_card if self.card else on_cpu

    def model(self, n_layer: int, dtype: torch.dtype) -> Transformer:
        args = ModelArgs.from_name(self.pick("Llama-3.2-1B", "tiny"))
        return random_model(replace(args, n_layer=self.pick(n_layer, args.n_layer)), self.device, dtype)

    def timed(self, run: Callable, count: int = 1) -> float:
        """Seconds per call."""
        synchronize(self.device)
        begin = time.perf_counter()
        for _ in range(count):
            run()
        synchronize(self.device)
        return (time.perf_counter() - begin) / count


class Part:
    """One part's progress: lines as they come, figures for the JSON, what failed, key figures for the table."""

    def __init__(self, name: str, budget_s: float):
        self.name, self.budget_s, self.begin = name, budget_s, time.perf_counter()
        self.figures, self.failures, self.summary, self.cut = {}, [], [], False

    def check(self, ok: bool, what: str, **figures) -> None:
        """Keep and print figures; a unit stands in a figure's name."""
        self.figures[what] = figures
        shown = [f"{k.replace('_', ' ')} {f'{v:.4g}' if isinstance(v, float) else v}" for k, v in figures.items()]
        print(f"{self.name}: {'' if ok else 'FAIL '}{what}: {', '.join(shown)}", flush=True)
        self.failures += [] if ok else [what]

    def note(self, text: str) -> None:
        """What is neither right nor wrong, for the table too."""
        print(f"{self.name}: {text}", flush=True)
        self.summary.append(text)

    @property
    def left_s(self) -> float:
        return self.begin + self.budget_s - time.perf_counter()

    def each(self, work: Iterable) -> Iterator:
        """Pieces of work until the time is used up."""
        for piece in work:
            if self.left_s < 0:
                print(f"{self.name}: stops early, its {self.budget_s:.0f} s are used up", flush=True)
                self.cut = True
                return
            yield piece

    def column(self, figure: str, of: str = "") -> list:
        return [f[figure] for what, f in self.figures.items() if what.startswith(of) and figure in f]


def spoil(*tensors: Tensor) -> None:
    """Fill with what must never be read: NaN, or the largest code."""
    for t in tensors:
        t.fill_(math.nan if t.is_floating_point() else torch.iinfo(t.dtype).max)


def stored(model: Transformer) -> list[Tensor]:
    return [t for layer in model.layers for t in layer.attention.kv_cache.stored]


def dequantized(kind: str, kept: list[Tensor], n: int) -> Tensor:
    """K and V of slots 0..n-1 as the cache holds them, [2, B, K, n, D] float64."""
    _, B, K, _, D = kept[0].shape
    both = torch.empty(2, B, K, n, D, dtype=torch.float64, device=kept[0].device)
    for side in (0, 1):
        scale = KV_CACHES[kind].load(kept, side, 0, both[side])
        both[side].mul_(1 if scale is None else scale.double().unsqueeze(-1))
    return both


def model_kv(model: Transformer, n: int) -> Tensor:
    return torch.cat([dequantized(model.shared.kind, layer.attention.kv_cache.stored, n) for layer in model.layers])


def error(x: Tensor, ref: Tensor) -> float:
    return float((x.double() - ref.double()).norm() / ref.double().norm())


def worst(*errors: float) -> float:
    return max(errors, key=lambda e: math.inf if math.isnan(e) else e)  # NaN is worst


def prompt_of(args: ModelArgs, length: int, seed: int = 1, B: int = 1) -> Tensor:
    return torch.randint(args.vocab_size, (B, length), generator=torch.Generator().manual_seed(seed))


def label(dtype: torch.dtype, kind: str = "", linear: bool = True) -> str:
    return " ".join([str(dtype).removeprefix("torch."), *kind.split(), *["square mask"] * (not linear)])


def release() -> None:
    """Give back compiled graphs and memory that nothing refers to any more; counts begin anew."""
    torch.compiler.reset()
    counters.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def eager_run(model: Transformer, prompt: Tensor, count: int) -> Tensor:
    """Logits of `count` greedy steps from spoiled caches, [B, count, V]; their argmax are the tokens."""
    spoil(model.shared.scratch, *stored(model))
    logits, device = [prefill(model, prompt, 128)], model.norm.weight.device
    for i in range(count - 1):
        pos = torch.tensor([prompt.shape[1] + i, 0, 1]).to(device)
        (x,) = model([logits[-1].argmax(-1, keepdim=True)], [pos], decode=True)
        logits.append(model.logits(x).squeeze(1))
    return torch.stack(logits, 1)


class Operator:
    """The attention operator alone, on a spoiled cache of L slots and a spoiled scratch."""

    def __init__(self, kind: str, B: int, H: int, K: int, D: int, L: int, dtype: torch.dtype, device: torch.device):
        cache, slots = KV_CACHES[kind], round_up(L, BLOCK)
        self.kind, self.shape = kind, (B, H, K, D)
        self.freqs_cis = rope_table(ModelArgs(n_head=H, head_dim=D, rope_base=500000.0), slots).to(device)
        self.constants = [t.to(device) for t in (causal_triangle(), *cache.constants(D))]
        self.stored = [torch.empty(s, dtype=t, device=device) for s, t in cache.stores(B, K, slots, D, dtype)]
        self.scratch = torch.empty(scratch_bytes(B, H, K, D, dtype), dtype=torch.uint8, device=device)
        spoil(self.scratch, *self.stored)
        # what the kind multiplies heads with before it stores them: symmetric, its own inverse
        self.rotation = (self.constants[1] if len(self.constants) > 1 else torch.eye(D).to(device)).double()

    def __call__(self, qkv: Tensor, pos: Tensor, decode: bool, mask: Tensor | None = None) -> Tensor:
        shared = (self.freqs_cis, self.constants, self.stored, self.scratch)
        return torch.ops.llama.attend(qkv, *shared, pos.to(qkv.device), mask, self.kind, decode)

    def heads(self, qkv: Tensor, base: int) -> list[Tensor]:
        """q, k, v in float64 [B, heads, R, D]; q and k after RoPE for positions base and after."""
        B, H, K, D = self.shape
        q, k, v = qkv.reshape(B, -1, H + 2 * K, D).transpose(1, 2).double().split([H, K, K], 1)
        cos, sin = self.freqs_cis[base : base + qkv.shape[1]].double().unbind(-1)
        pairs = [(x[..., ::2], x[..., 1::2]) for x in (q, k)]
        return [torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2) for a, b in pairs] + [v]

    def reference(self, qkv: Tensor, base: int, n: int) -> Tensor:
        """Exact softmax in float64 over what slots 0..n-1 hold; row r sees slots up to base + r. [B, R, H * D]"""
        (B, H, K, D), R = self.shape, qkv.shape[1]
        q = (self.heads(qkv, base)[0] @ self.rotation).reshape(B, K, -1, D)
        k, v = dequantized(self.kind, self.stored, n)
        scores = (q @ k.transpose(-1, -2)).view(B, H, R, n) / math.sqrt(D)
        scores.masked_fill_(torch.ones(R, n, dtype=torch.bool, device=q.device).triu_(base + 1), -math.inf)
        out = torch.softmax(scores, -1).view(B, K, -1, n) @ v @ self.rotation
        return out.view(B, H, R, D).transpose(1, 2).reshape(B, R, H * D)


def operator(part: Part, place: Place) -> None:
    """The operator against float64 on the same stored values: a prompt's last tile and the decode step after it. Also: are
    the stored values right, and does the square mask give the same bits?"""
    for dtype, kind, (H, K, D) in part.each(product(OPERATOR_LIMITS, KV_CACHES, ((32, 8, 128), (9, 3, 64)))):
        found, masks_differ = dict(prefill=0.0, decode=0.0, stored=0.0), 0
        for n in place.pick((1, 31, 256, 300, 892, 2048, 4096), (1, 33, 300)):
            torch.manual_seed(n)
            op = Operator(kind, 2 if n < 1024 else 1, H, K, D, n + 1, dtype, place.device)
            qkv = torch.randn(op.shape[0], round_up(n + 1, PREFILL_ROWS), (H + 2 * K) * D, device=place.device).to(dtype)
            for ((base, height, first, stop),) in prefill_plan(n, PREFILL_ROWS):
                rows, pos = qkv[:, base : base + height].contiguous(), torch.tensor([base, first, stop])
                out = op(rows, pos, False)
            errors = [error(out[:, :stop], op.reference(rows, base, n)[:, :stop])]
            square = torch.ones(height, n + 1, dtype=torch.bool, device=place.device).tril_(base)
            masks_differ += not torch.equal(out[:, :stop], op(rows, pos, False, square)[:, :stop])
            row = qkv[:, n : n + 1].contiguous()
            errors.append(error(op(row, torch.tensor([n, 0, 1]), True), op.reference(row, n, n + 1)))
            kept = dequantized(kind, op.stored, n + 1) @ op.rotation
            errors.append(error(kept, torch.stack(op.heads(qkv[:, : n + 1], 0)[1:])))
            found = {name: worst(found[name], e) for name, e in zip(found, errors)}
        limit = OPERATOR_LIMITS[dtype]
        allowed = dict(prefill=limit, decode=limit, stored=limit if kind == "plain" else INT8_LIMIT)
        right = all(found[name] <= allowed[name] for name in found) and not masks_differ
        found |= dict(limit=limit, square_masks_that_differ=masks_differ)
        part.check(right, f"{label(dtype, kind)} H/K {H}/{K} D {D}", **found)
    errors = {dtype: part.column("prefill", dtype) + part.column("decode", dtype) for dtype in map(label, OPERATOR_LIMITS)}
    part.summary += [f"{dtype} off by {worst(*found):.1e}" for dtype, found in errors.items() if found]


def compare_chunks(model: Transformer, prompt: Tensor, chunks: tuple[int, ...], run: Callable) -> dict:
    """Prefill by each chunk size, against the first of them: the sizes for which a bit of the last logits or of the caches
    differs (unwritten slots too: they must stay spoiled), and the largest difference of a logit and of a stored value."""
    results, differing, off = [], [], (0.0, 0.0)
    for chunk in chunks:
        spoil(model.shared.scratch, *stored(model))
        logits = run(model, prompt, chunk).clone()
        bits = [t.flatten().view(torch.uint8).clone() for t in (logits, *stored(model))]
        results = [*results[:1], (bits, (logits.double(), model_kv(model, prompt.shape[1])))]
        if not all(map(torch.equal, results[0][0], bits)) or not logits.isfinite().all():
            differing.append(chunk)
            off = [worst(o, float((a - b).abs().max())) for o, a, b in zip(off, results[0][1], results[-1][1])]
    return dict(chunkings_that_differ=differing, of=len(chunks) - 1, largest_logit=off[0], largest_stored=off[1])


def chunks(part: Part, place: Place) -> None:
    """No bit of the last logits or of the caches depends on the chunk size."""
    many, one = place.pick((892, 17, 64, 73, 128, 256, 300, 892, 1024), (300, 64, 73, 256)), (place.pick(70, 20), 1)
    for dtype in (BF16, FP16, FP32):
        model = place.model(4, dtype)
        for kind, linear, tried in part.each(product(KV_CACHES, (True, False), (many, one))):
            model.setup_caches(1, tried[0], kind, linear)
            found = compare_chunks(model, prompt_of(model.args, tried[0]), tried, prefill)
            part.check(not found["chunkings_that_differ"], f"{label(dtype, kind, linear)}, {tried[0]} tokens", **found)
    differ = sum(map(len, part.column("chunkings_that_differ")))
    part.summary.append(f"{differ} of {sum(part.column('of'))} chunkings differ from one shot")


def repeat(part: Part, place: Place) -> None:
    """A, B, A in one process, everything spoiled between: the third run equals the first; generate() gives its tokens."""
    model, count = place.model(4, BF16), 16
    a, b = prompt_of(model.args, 300, 3, B=2), prompt_of(model.args, 333, 4, B=2)
    for kind, linear in part.each(product(KV_CACHES, (True, False))):
        model.setup_caches(2, 333 + count, kind, linear)
        first, other, third = (eager_run(model, p, count) for p in (a, b, a))
        spoil(model.shared.scratch, *stored(model))
        tokens = torch.cat(list(generate(model, a, count, GREEDY, 512, Steps())), 1)
        off, differ = float((first.double() - third.double()).abs().max()), int((tokens != first.argmax(-1)).sum())
        ok = torch.equal(first, third) and not differ and not torch.equal(first, other)
        part.check(ok, label(BF16, kind, linear), logits_off=off, tokens_that_differ=differ, tokens=tokens.numel())
    part.summary.append(f"{len(part.failures)} of {len(part.figures)} combinations differ")


def compiled(part: Part, place: Place) -> None:
    """Eager against compiled: logits, what the caches hold, and the greedy choice of each decode step, all fed with eager's
    tokens. Compiled against compiled: every chunk size, to the bit."""
    pairs = ("plain", True, BF16), ("int8", True, BF16), ("plain", False, BF16), ("int8", False, FP16), ("plain", True, FP32)
    count, T, tried = 24, *place.pick((300, (300, 17, 73, 128, 256, 1024)), (100, (100, 73)))
    for kind, linear, dtype in part.each(place.pick(pairs, pairs[-2:])):
        release()
        model, steps = place.model(2, dtype), compile_steps(place.device, True, True)
        model.setup_caches(1, T + count, kind, linear)
        prompt = prompt_of(model.args, T)
        eager = eager_run(model, prompt, count)
        tokens, eager_kv, pos = eager.argmax(-1), model_kv(model, T + count - 1), torch.tensor([T, 0, 1]).to(place.device)
        spoil(model.shared.scratch, *stored(model))
        limit, begin = COMPILED_LIMITS[dtype], time.perf_counter()
        off, chosen = error(steps.prefill(model, prompt, 512), eager[:, 0]), [tokens[:, :1]]
        for i in range(count - 1):
            chosen.append(steps.decode(model, tokens[:, i : i + 1].clone(), pos, GREEDY).clone())
            pos[0] += 1
        seconds, kv_off = time.perf_counter() - begin, error(model_kv(model, T + count - 1), eager_kv)
        differ = (torch.cat(chosen, 1) != tokens)[0].nonzero().flatten().tolist()
        # by how much eager prefers its own choice, in deviations of the logits: little where two are nearly equal
        lead = float((eager.amax(-1, keepdim=True) - eager.gather(-1, torch.stack(chosen, 1))).max() / eager.double().std())
        found, skips = compare_chunks(model, prompt, tried, steps.prefill), counters["inductor"]["cudagraph_skips"]
        part.check(
            worst(off, kv_off, lead / 10) <= limit and not found["chunkings_that_differ"] and not skips,
            label(dtype, kind, linear), logits_off=off, stored_off=kv_off, limit=limit, choices_that_differ=len(differ),
            choices=count - 1, first_at=differ[0] if differ else None, preferred_by=lead, **found, cuda_graph_skips=skips,
            seconds_with_compiling=seconds,
        )  # fmt: skip
        part.summary.append(f"{label(dtype, kind, linear)} logits off by {off:.1e}, {len(differ)} choices differ")
    part.summary.append(f"{sum(map(len, part.column('chunkings_that_differ')))} chunkings differ")


def graphs(part: Part, place: Place) -> None:
    """The compiled decode step is captured, never skipped and never compiled again; its rate against eager."""
    warm, count, T = 4, 50, 256
    names = ("cudagraph_skips", "cudagraph_partitions", "cudagraph_recorded_non_static_inputs", "fxgraph_cache_hit")
    for kind in part.each(KV_CACHES):
        release()
        model, rate, inductor = place.model(16, BF16), [], counters["inductor"]
        model.setup_caches(1, T + 2 * count, kind)
        for steps in (Steps(), compile_steps(place.device, True, False)):
            run = partial(next, generate(model, prompt_of(model.args, T), 2 * count, GREEDY, 512, steps))
            run()  # the prompt
            warm_s = warm * place.timed(run, warm)
            before = counters["stats"]["unique_graphs"], inductor[names[2]]
            rate.append(1 / place.timed(run, count))
        again = before != (counters["stats"]["unique_graphs"], inductor[names[2]])
        seen, breaks = {}, counters["graph_break"].total()
        if place.card:
            with torch.profiler.profile() as profile:
                place.timed(run)
            seen = {e.key: e.count for e in profile.key_averages() if "Launch" in e.key}
        part.check(
            before[0] == 1 and not (again or breaks or inductor[names[0]]) and (not seen or "cudaGraphLaunch" in seen),
            f"{label(BF16, kind)}, {model.args.n_layer} layers", graphs=before[0], compiled_or_recorded_again=again,
            graph_breaks=breaks, **{k: inductor[k] for k in names}, launches_per_step=seen, first_steps_s=warm_s,
            eager_tok_per_s=rate[0], compiled_tok_per_s=rate[1],
        )  # fmt: skip
        part.summary.append(f"{kind} decode {rate[0]:.0f} -> {rate[1]:.0f} tok/s, compiled in {warm_s:.0f} s")


def rates(part: Part, place: Place) -> None:
    """Eager rates, reserved memory against what should be there, and the operator's time against reading the cache once."""
    count, mib, model = 32, 2**20, place.model(16, BF16)
    for kind, n in part.each(product(KV_CACHES, place.pick((512, 4096, 16384), (64, 300)))):
        model.setup_caches(1, n + count, kind)
        list(generate(model, prompt_of(model.args, 64), 3, GREEDY, 512, Steps()))  # warm-up
        release()
        run = partial(next, generate(model, prompt_of(model.args, n), count, GREEDY, 512, Steps()))
        prefill_rate, decode_rate = n / place.timed(run), 1 / place.timed(run, count - 1)
        sums = [sum(t.nbytes for t in ts) / mib for ts in (model.parameters(), stored(model), model.shared.buffers())]
        memory = dict(zip(("weights_mib", "caches_mib", "scratch_and_tables_mib"), sums))
        beyond = torch.cuda.max_memory_reserved() / mib - sum(memory.values()) if place.card else 0.0
        figures = dict(prefill_tok_per_s=prefill_rate, decode_tok_per_s=decode_rate) | memory
        part.check(beyond >= 0, f"{label(BF16, kind)}, n {n}", **figures, reserved_beyond_those_mib=beyond)
        part.summary.append(f"{kind} n {n}: {prefill_rate:.0f} and {decode_rate:.0f} tok/s")
    block = torch.ones(place.pick(2**28, 2**24), dtype=torch.uint8, device=place.device)
    copy = partial(torch.empty_like(block).copy_, block)
    bandwidth = 2 * block.nbytes / min(place.timed(copy, 10) for _ in range(3))
    for kind, n in part.each(product(KV_CACHES, place.pick((1024, 8192, 32768, 131072), (512,)))):
        op = Operator(kind, 1, 32, 8, 128, n, BF16, place.device)
        qkv, pos = torch.ones(1, 1, 48 * 128).to(place.device, BF16), torch.tensor([n - 1, 0, 1]).to(place.device)
        took = min(place.timed(partial(op, qkv, pos, True), 10) for _ in range(3)) * 1e6
        figures = dict(us=took, floor_us=sum(t.nbytes for t in op.stored) / bandwidth * 1e6, copied_GB_per_s=bandwidth / 1e9)
        part.check(True, f"attend decode {kind} H/K 32/8 D 128, n {n}", **figures)


# --- memory: what --dry_run predicts, against the card ---

KEPT = (*predict.KEPT, "scratch")  # categories of what stands in named tensors
INT4 = "int4wo-64 + kv_quant + linear"
ROWS = {  # name -> flags of generate.py
    "normal": ("--no-linear_causal_mask",),
    "kv_quant": ("--no-linear_causal_mask", "--kv_cache_quantization"),
    "kv_quant + linear": ("--kv_cache_quantization",),
    INT4: ("--quantization", "int4wo-64", "--kv_cache_quantization"),
}
NEW_TOKENS = 8


@dataclass
class Taken:
    """Bytes that a run took, simulated or real: what is kept, by category; peaks of torch's allocator (0: no card)."""

    kept: dict[str, int]
    allocated: int = 0
    reserved: int = 0

    def categories(self) -> dict[str, int]:
        """The peak's parts. What is kept is counted as its tensors are, so the rounding of blocks falls to what else there
        is: activations, logits, the workspace of cuBLAS, blocks of weights on their way."""
        more = {"everything else": self.allocated - sum(self.kept.values()), "fragmentation": self.reserved - self.allocated}
        return dict.fromkeys(KEPT, 0) | self.kept | more


def compare_memory(simulated: Taken, real: Taken) -> tuple[bool, dict]:
    """Whether they agree: what is kept to the byte; the peak, where there is one, within PEAK_LIMIT. And the figures."""
    differ = [c for c in KEPT if simulated.kept.get(c) != real.kept.get(c)]
    right = not differ and {"weights", "KV cache"} <= real.kept.keys()
    pairs = {c: [taken.kept.get(c, 0) for taken in (simulated, real)] for c in differ}
    figures = dict(kept_bytes=real.kept, simulated_and_kept_bytes_that_differ=pairs)
    if not real.reserved:
        return right, figures
    off, sums = simulated.reserved - real.reserved, (simulated.categories(), real.categories())
    sums = {c: [round(x[c] / 1e6, 1) for x in sums] for c in sums[0]}
    return right and abs(off) <= PEAK_LIMIT * real.reserved, figures | dict(
        simulated_MB=simulated.reserved / 1e6, measured_MB=real.reserved / 1e6, off_MB=off / 1e6,
        off_percent=100 * off / real.reserved, limit_percent=100 * PEAK_LIMIT,
        simulated_and_measured_MB_where_they_differ={c: pair for c, pair in sums.items() if pair[0] != pair[1]},
    )  # fmt: skip


def held_bytes(watch: Watch) -> dict[str, int]:
    """What the tensors hold that a watch was told of, each counted once."""
    sums = {category: sum(dict(storages).values()) for category, storages in watch.held.items()}
    return {category: sums[category] for category in KEPT if sums.get(category)}


def snapshot_bytes(snapshot: dict) -> dict[str, int]:
    """The same of a memory snapshot: the bytes asked for and never freed."""
    live = {}
    for e in (e for events in snapshot["device_traces"] for e in events):
        if e["action"] == "alloc":
            live[e["addr"]] = e
        elif e["action"] == "free_completed":
            live.pop(e["addr"], None)
    sums = {category: sum(e["size"] for e in live.values() if e["category"] == category) for category in KEPT}
    return {category: size for category, size in sums.items() if size}


def this_card(place: Place) -> Gpu:
    """The card as `predict.check_memory` sees it, with what is free; without one, a card that the small rows fit."""
    if not place.card:
        return GPUS[DEFAULT_GPU]
    free = torch.cuda.mem_get_info(place.device)[0] + torch.cuda.memory_reserved(place.device)
    name, capability = torch.cuda.get_device_name(place.device), torch.cuda.get_device_capability(place.device)
    return Gpu(name, 0, free + CONTEXT, capability)  # the context is there already


class Timed(Recorder):
    """Ends a prompt between two chunks when its time is used up."""

    end = math.inf

    def distinct(self, items, key, memo=None):
        for item in items:
            if time.perf_counter() > self.end:
                raise TimeoutError(f"stopped after {self.phase}")
            yield item


class MemoryRow:
    """One command of generate.py, to be simulated and run. On a CPU in float32, since kernels for a CPU in bfloat16 keep a
    second copy of quantized weights, which no card does."""

    def __init__(self, part: Part, place: Place, gpu: Gpu, row: str, tokens: int):
        model, slots, chunk = place.pick(("Llama-3.1-8B", 131072, 512), ("tiny", 256, 64))
        text = f"--random_weights {model} --cache_size {slots} --max_new_tokens {NEW_TOKENS} --prefill_chunk {chunk}"
        text += f" --prompt_tokens {tokens} --precision {place.pick('bfloat16', 'float32')}"
        self.part, self.place, self.gpu, self.what = part, place, gpu, f"{row}, {tokens} tokens"
        self.args = build_parser().parse_args([*text.split(), *ROWS[row]])
        self.checkpoint, tokenizer = find_model(self.args, place.device)
        self.ids = prompt_ids(self.args, self.checkpoint.args, tokenizer)
        fit_lengths(self.args, self.checkpoint.args, len(self.ids))

    def run(self, path: str | None, end: float) -> tuple[Transformer, Taken]:
        """What generate.py does from loading on. Of what was there before, a workspace of cuBLAS and its segment serve this
        run as well; the rest is not this run's."""
        release()
        device, before = self.place.device, (0, 0)
        if self.place.card:
            before = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        with Timed(path, device) as watch:
            model, _ = set_up(self.args, self.checkpoint, device, watch)
            sampling = Sampling(self.args.temperature, self.args.top_k, self.args.top_p)
            prompt, steps = torch.tensor([self.ids]), Steps()
            watch.phase = "warm-up"
            warm_up(model, prompt, self.args, sampling, steps, watch)
            watch.end = end
            torch.manual_seed(self.args.seed)
            tokens = generate(model, prompt, NEW_TOKENS, sampling, self.args.prefill_chunk, steps, watch)
            try:
                for _ in read_tokens(tokens, device):
                    pass
            except TimeoutError as e:
                self.part.note(f"{self.what}: {e}")
                self.part.cut = True
            synchronize(device)
            if not self.place.card:
                return model, Taken(held_bytes(watch))
            peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
            serves = self.gpu.workspace, max(self.gpu.workspace, 20 * MIB)
            return model, Taken(held_bytes(watch), *(p - max(b - s, 0) for p, b, s in zip(peaks, before, serves)))

    def check(self, folder: Path | None = None, end: float = math.inf) -> Transformer | None:
        """Simulate, run, compare; with a folder, snapshots of both. Returns the model, unless it does not fit."""
        begin, part = time.perf_counter(), self.part
        prediction, figures = None, {}
        try:
            prediction = predict.simulate(rehearse, self.args, self.checkpoint, len(self.ids), self.gpu)
            seconds, (phase, at_peak) = time.perf_counter() - begin, prediction.at_peak
            at_peak = {c: round(size / 1e6, 1) for c, size in at_peak.items() if c not in KEPT}
            figures |= dict(simulated_in_s=seconds, simulated_peak_in_phase=phase, simulated_then_besides_kept_MB=at_peak)
            snapshot = simulated_snapshot(prediction.card)
        except Exception as e:  # what is measured is worth having all the same
            part.check(False, f"simulation of {self.what}", error=f"{type(e).__name__}: {e}"[:400])
        if prediction and prediction.spare(self.gpu) < 0:
            peak, free = prediction.reserved / 1e9, self.gpu.usable / 1e9
            part.note(f"{self.what}: skipped, {peak:.2f} GB predicted and {free:.2f} GB free")
            return None
        path = str(folder / "measured.pickle") if folder else None
        begin = time.perf_counter()
        try:
            model, real = self.run(path, end)
        except OSError as e:  # out of memory, in one line: the next row may fit
            part.check(False, self.what, **figures, error=str(e)[:400])
            return None
        figures["run_in_s"] = time.perf_counter() - begin
        if prediction is None:
            sums = {c: round(size / 1e6, 1) for c, size in real.categories().items()}
            part.check(True, f"{self.what}, measured alone", **figures, measured_MB=real.reserved / 1e6, of_which_MB=sums)
            return model
        allocator = prediction.card.allocator
        simulated = Taken(snapshot_bytes(snapshot), allocator.peak_allocated, allocator.peak_reserved)
        right, found = compare_memory(simulated, real)
        part.check(right, self.what, **figures, **found)
        if self.place.card:
            off = found["off_percent"]
            part.summary.append(f"{self.what}: {real.reserved / 1e9:.2f} GB, simulated {off:+.1f} %")
        if folder:
            write_snapshot(str(folder / "simulated.pickle"), snapshot)
            with open(path, "rb") as f:
                recorded = snapshot_bytes(pickle.load(f))
            files = path.replace("measured", "{measured,simulated}") if folder == self.place.out else None
            part.check(recorded == real.kept, "recorded snapshot", tensors=real.kept, snapshot=recorded, files=files)
        return model


def affordable_chunks(part: Part, place: Place, model: Transformer, chunk: int, spare_s: float) -> int:
    """For how many chunks of a prompt there is time, by measuring one and a few: n of them take a n + b n^2, since each
    attends to all before it."""
    few = place.pick(8, 3)
    prompts = [prompt_of(model.args, n * chunk) for n in (1, few)]
    prefill(model, prompts[0], chunk)  # warm-up
    one, several = (place.timed(partial(prefill, model, prompt, chunk)) for prompt in prompts)
    b = max(several - few * one, 0) / (few * few - few)
    a, seconds = max(one - b, 1e-9), max(0.8 * (part.left_s - spare_s), 0)
    return int(2 * seconds / (a + math.sqrt(a * a + 4 * b * seconds)))


def memory(part: Part, place: Place) -> None:
    """The simulated peak against the one that torch's allocator reports, row by row, each with a model loaded anew; the last
    row again with as much of its context filled as there is time for. Without a card there is no peak: the simulated
    tensors' bytes are compared with those of the real ones."""
    gpu = this_card(place)
    if not place.card:
        print("memory: bytes of tensors on the CPU, simulated and real: no statement about a card", flush=True)
    for name in filter(os.environ.get, ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        part.note(f"{name} is set, and the simulation is of the default settings")
    row, begin, refused, works = MemoryRow(part, place, gpu, INT4, 6), time.perf_counter(), None, True
    try:
        predict.check_memory(rehearse, row.args, row.checkpoint, len(row.ids), place.device)
    except Exception as e:
        refused, works = f"{type(e).__name__}: {e}"[:400], isinstance(e, ValueError)
    part.check(works, "check before a run", seconds=time.perf_counter() - begin, wanted_s=2, refused=refused)
    model, row_s = None, 0.0
    with nullcontext(place.out) if place.out else tempfile.TemporaryDirectory() as folder:
        for name in part.each(ROWS):
            model, begin = None, time.perf_counter()  # the last row's model goes before the next one comes
            model = MemoryRow(part, place, gpu, name, 6).check(Path(folder) if name == INT4 else None)
            row_s = time.perf_counter() - begin
    chunks, chunk, slots = 0, row.args.prefill_chunk, row.args.cache_size
    if model is not None and not part.cut:
        chunks = min(affordable_chunks(part, place, model, chunk, row_s), (slots - NEW_TOKENS) // chunk)
    if not chunks:
        part.note(f"no row with its context filled: {'no such model' if model is None else 'no time left'}")
        return
    model = None
    part.note(f"filled: {chunks * chunk:,} of {slots:,} slots")
    MemoryRow(part, place, gpu, INT4, chunks * chunk).check(end=part.begin + part.budget_s)
    if not place.card:
        compared = part.column("simulated_and_kept_bytes_that_differ")
        part.summary.append(
            f"{sum(map(bool, compared))} of {len(compared)} simulated commands differ from the CPU's tensors"
        )


# name -> (function, seconds it may take)
PARTS: dict[str, tuple[Callable[[Part, Place], None], float]] = {
    "operator": (operator, 15), "chunks": (chunks, 45), "repeat": (repeat, 15),
    "compiled": (compiled, 35), "graphs": (graphs, 25), "rates": (rates, 20),
    "memory": (memory, 120),
}  # fmt: skip


def run_part(part: Part, place: Place) -> str:
    """Returns the verdict; whatever fails in a part, the others still run."""
    compiler = place.card or any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++")))
    if part.name in ("compiled", "graphs") and not compiler:
        return "skipped: no C++ compiler, which torch.compile needs on a CPU"
    if part.budget_s < 3:
        return "skipped: no time left"
    try:
        PARTS[part.name][0](part, place)
        part.failures += [] if part.figures else ["nothing was checked"]
    except Exception as e:
        at = [f for f in traceback.extract_tb(e.__traceback__) if "site-packages" not in f.filename][-1]
        text = next(iter(str(e).strip().splitlines()), "")[:200]
        part.failures.append(f"{type(e).__name__}: {text} ({Path(at.filename).name}:{at.lineno})")
        print(f"{part.name}: FAIL {part.failures[-1]}", flush=True)
    part.summary += ["stopped early"] if part.cut else []
    part.summary += [f"{len(part.failures)} failed, the first: {x}" for x in part.failures[:1]]
    return "FAIL" if part.failures else "ok"


def environment(place: Place) -> dict:
    ask, driver = "nvidia-smi --query-gpu=driver_version --format=csv,noheader".split(), None
    if place.card and shutil.which(ask[0]):
        driver = subprocess.run(ask, capture_output=True, text=True).stdout.strip()
    versions = dict(torch=torch.__version__, CUDA=torch.version.cuda, driver=driver)
    triton = __import__("triton").__version__ if find_spec("triton") else None
    return versions | dict(triton=triton, device=device_name(place.device), commit=commit())


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--json", metavar="FILE", help="write one JSON object per part, a line each")
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help="where the part memory writes measured.pickle and simulated.pickle, for "
        "scripts/plot_memory.py (default: the folder of --json; without both they are not kept)",
    )
    args = parser.parse_args(argv)
    begin, card, rows = time.perf_counter(), torch.cuda.is_available(), [("part", "verdict", "key figures")]
    out = Path(args.out) if args.out else Path(args.json).parent if args.json else None
    if out:
        out.mkdir(parents=True, exist_ok=True)
    place = Place(torch.device("cuda:0" if card else "cpu"), card, out)
    env = environment(place)
    print(", ".join(f"{k} {v}" for k, v in env.items()), flush=True)
    if not card:
        torch.set_num_threads(1)  # sizes this small only wait for a second thread
        print("no CUDA here: small sizes on the CPU, nothing below is a statement about a card", flush=True)
    with open(args.json or os.devnull, "w") as lines:
        for name in args.only:
            part = Part(name, min(PARTS[name][1], TOTAL_S - (time.perf_counter() - begin)))
            verdict, seconds = run_part(part, place), time.perf_counter() - part.begin
            rows.append((name, verdict, "; ".join([f"{seconds:.1f} s", *part.summary])))
            result = dict(part=name, verdict=verdict, seconds=seconds, environment=env)
            print(json.dumps(result | vars(part)), file=lines, flush=True)
            release()
    print(f"\n{time.perf_counter() - begin:.0f} s in all", flush=True)
    for name, verdict, figures in rows:
        print(f"{name:8} | {verdict:7} | {figures}", flush=True)
    return int(any(row[1] == "FAIL" for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
