"""What a run will take of a CUDA card's memory, found by running it on a simulated one: the table of `--dry_run`, the check
before a real run, what else would fit, and the largest context that does (`--fit`). GB = 1e9 bytes.

`rehearse` is generate.py's: the same load, set-up, warm-up and generation that a real run does.
"""

import argparse
import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch

from attention import BLOCK, KV_CACHES
from checkpoint import empty_model
from entries import Checkpoint
from measure import say
from memory import COMMON, CONTEXT, GPUS, Card, Gpu, Repeated, Watch, simulated_cuda
from model import Transformer
from quantize import QUANTIZERS, QuantizedLinear, swap_layers

CATEGORIES = {
    "weights": "",
    "KV cache": "",
    "mask": "the square one",
    "tables": "RoPE, and constants of the attention operator",
    "scratch": "of attention and of expanded weights, allocated once",
    "activations": "",
    "logits and sampling": "",
    "loading": "blocks of weights on their way",
    "workspace": "of cuBLAS",
}

KEPT = ("weights", "KV cache", "mask", "tables")


def name_parts(model: Transformer, watch: Watch) -> None:
    """Tell a watch what a model and its caches hold."""
    watch.name("weights", model.weights())
    if (shared := model.shared) is None:
        return
    watch.name("KV cache", [t for layer in model.layers for t in layer.attention.kv_cache.stored])
    watch.name("mask", [] if shared.mask is None else [shared.mask])
    watch.name("tables", [shared.freqs_cis, *shared.constants])
    watch.name("scratch", [shared.scratch, shared.weight_buffer, shared.weight_scratch])


def watch_model(model: Transformer, card: Card) -> None:
    """From now on the card tells logits from activations, and layers that repeat each other are left out."""

    def logits(x):
        card.scope = "logits and sampling"
        return Transformer.logits(model, x)

    model.logits = logits
    model.register_forward_pre_hook(lambda *_: setattr(card, "scope", "activations"))
    model.layers = Repeated(model.layers, card)
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.visit = blocks_of(module, card)
    card.scope = "activations"


def blocks_of(layer: QuantizedLinear, card: Card) -> Callable[[range], Iterator[int]]:
    """The blocks of a layer, less those that are like others."""
    return lambda starts: card.distinct(starts, lambda start: min(starts.step, layer.shape[0] - start))


# --- one prediction ---

Rehearse = Callable[[Card, Checkpoint, argparse.Namespace, int], Transformer]


@dataclass(frozen=True)
class Prediction:
    """What a run takes on a card that never runs out: bytes reserved by torch at the peak, by category in that moment."""

    card: Card
    model: Transformer
    estimate: bool

    @property
    def reserved(self) -> int:
        return self.card.allocator.peak_reserved

    @cached_property
    def at_peak(self) -> tuple[str, dict[str, int]]:
        """The phase, and bytes by category with what is reserved and not in use."""
        event, sums = self.card.at_peak()
        return event.phase, sums | {"fragmentation": self.reserved - sum(sums.values())}

    @property
    def resident(self) -> int:
        """What must be there: weights, KV cache, mask and tables."""
        return resident_bytes(self.model)

    def spare(self, gpu: Gpu) -> int:
        return gpu.usable - self.reserved

    def record(self) -> dict:
        """Fields for the result line."""
        phase, sums = self.at_peak
        return {
            "peak_phase": phase,
            "peak_allocated_gb": self.card.allocator.peak_allocated / 1e9,
            "resident_gb": self.resident / 1e9,
            "memory_gb": {category: size / 1e9 for category, size in sums.items()},
            "estimate": self.estimate,
        }


def resident_bytes(model: Transformer) -> int:
    shared = model.shared
    kept = [*shared.constants, shared.freqs_cis, *([] if shared.mask is None else [shared.mask])]
    return model.weight_bytes() + model.kv_cache_bytes() + sum(t.nbytes for t in kept)


def simulate(rehearse: Rehearse, args, checkpoint: Checkpoint, T: int, gpu: Gpu, jump: bool = True) -> Prediction:
    """Run the command with a prompt of T tokens on a simulated card."""
    card = Card(gpu, jump)
    with simulated_cuda(card):
        model = rehearse(card, checkpoint, args, T)
    card.jump = False  # whoever looks at the model from now on sees all layers
    return Prediction(card, model, bool(args.compile or args.compile_prefill))


def describe(args, checkpoint: Checkpoint, T: int) -> str:
    mask = "linear" if args.linear_causal_mask else "square"
    rows = f", {args.batch_size} rows" if args.batch_size > 1 else ""
    return (
        f"{checkpoint.args.name}, {args.quantization or args.precision} weights, {args.kv_cache_quantization or 'plain'} KV "
        f"cache of {args.cache_size:,} slots, {mask} mask{rows}; prompt of {T:,} tokens in chunks of {args.prefill_chunk:,}"
    )


def table(p: Prediction, args, checkpoint: Checkpoint, T: int) -> Iterator[str]:
    """The lines of `--dry_run`."""
    gpu, (phase, sums) = p.card.gpu, p.at_peak
    notes = CATEGORIES | {"fragmentation": "reserved by torch, in use by nothing"}
    yield describe(args, checkpoint, T)
    yield f"simulated on {gpu.name}; GB = 1e9 bytes" + ("; an ESTIMATE: compiled code was run uncompiled" * p.estimate)
    yield ""
    for category in (c for c in notes if sums.get(c)):
        yield row(category, sums[category], notes[category])
    yield row("peak reserved", p.reserved, f"in phase '{phase}'")
    yield row("must be resident", p.resident, f"{', '.join(KEPT)}; the peak is {(p.reserved - p.resident) / 1e9:.3f} above")
    yield row("allocated at most", p.card.allocator.peak_allocated, "at any moment, in whole blocks, as torch counts it")
    yield ""
    yield f"  {gpu.name}: {verdict(p, gpu)}"
    yield ""
    yield f"  {'card GB':>9}{'usable':>9}"
    for other in map(GPUS.__getitem__, COMMON):
        yield f"  {other.marketed_gb:9}{other.usable / 1e9:9.2f}  {verdict(p, other)} ({other.name})"
    yield f"  usable: GB that torch sees of such a card (sold by GiB), less {CONTEXT / 1e9:.1f} for the CUDA context"


def row(name: str, size: int, note: str) -> str:
    return f"  {name:20}{size / 1e9:9.3f}   {note}".rstrip()


def verdict(p: Prediction, gpu: Gpu) -> str:
    spare = p.spare(gpu) / 1e9
    size = f"{abs(spare):.2f}" if abs(spare) >= 0.005 else "less than 0.01"
    return f"fits, {size} to spare" if spare >= 0 else f"does not fit, {size} too little"


# --- other flags ---


def with_flags(args, **flags) -> argparse.Namespace:
    return argparse.Namespace(**vars(args) | flags)


def resident_with(args, checkpoint: Checkpoint) -> int:
    """What a command must keep, by arithmetic on the meta device. ValueError for more slots than bytes can be counted."""
    model, _ = empty_model(checkpoint.args)
    if args.quantization:
        swap_layers(model, args.quantization, args.keep_head)
    for parameter in model.parameters():  # not the buffers: codes and scales keep their dtype
        parameter.data = parameter.data.to(getattr(torch, args.precision))
    try:
        with torch.device("meta"):
            model.setup_caches(args.batch_size, args.cache_size, *cache_form(args))
    except (RuntimeError, OverflowError):
        raise ValueError(f"{args.batch_size} x {args.cache_size} slots are too many: use a smaller --cache_size") from None
    return resident_bytes(model)


def cache_form(args) -> tuple[str, bool]:
    """The cache kind, and whether the mask is the linear one."""
    return args.kv_cache_quantization or "plain", args.linear_causal_mask


def cheaper(args, checkpoint: Checkpoint, T: int) -> Iterator[tuple[str, dict]]:
    """Changes of flags that save memory, (as typed, as a dict), those that cost least first: the mask changes no result, nor
    does the chunk; then the cache; then the weights."""
    choices = [
        [(1, "--linear_causal_mask", dict(linear_causal_mask=True))] * (not args.linear_causal_mask),
        [(2, f"--prefill_chunk {BLOCK}", dict(prefill_chunk=BLOCK))] * (min(args.prefill_chunk, T) > BLOCK),
        [(4, "--kv_cache_quantization", dict(kv_cache_quantization="int8"))] * (args.kv_cache_quantization is None),
        [(8 * n, f"--quantization {s}", dict(quantization=s)) for n, s in enumerate(("int8wo", "int4wo-64"), 1)]
        * (args.quantization is None),
    ]
    options = product(*([(0, "", {}), *choice] for choice in choices))
    for option in sorted(options, key=lambda option: sum(cost for cost, _, _ in option)):
        flags = {name: value for _, _, change in option for name, value in change.items()}
        if flags:
            yield " ".join(text for _, text, _ in option if text), flags


def suggestion(rehearse: Rehearse, args, checkpoint: Checkpoint, T: int, gpu: Gpu) -> str:
    """The cheapest change of flags that makes a command fit, tried on the simulated card."""
    last = "", {}
    for text, flags in cheaper(args, checkpoint, T):
        changed = with_flags(args, **flags)
        try:
            must_have = resident_with(changed, checkpoint)
        except ValueError:  # a scheme that this model cannot take
            continue
        last = text, flags
        if must_have < gpu.usable:
            p = simulate(rehearse, changed, checkpoint, T, gpu)
            if p.spare(gpu) >= 0:
                return f"it fits with {text} ({p.reserved / 1e9:.2f} GB)"
    text, flags = last
    slots = largest_context(rehearse, with_flags(args, **flags), checkpoint, gpu)
    if not slots:
        return "no change of flags makes it fit"
    short = ": shorten the prompt" if slots < T + args.max_new_tokens else ""
    return f"the most is --cache_size {slots}" + (f" with {text}" if text else "") + short


def largest_context(rehearse: Rehearse, args, checkpoint: Checkpoint, gpu: Gpu) -> int:
    """The largest --cache_size that fits when it is filled (prompt = slots less --max_new_tokens), in whole blocks of slots
    up to the model's context; 0 if none does. What must be there is a polynomial of the slots; what comes on top hardly
    changes with them, and is taken from the last size that was simulated. So few sizes have to be: it ends with one that
    fits and a next one that does not."""

    def peak(slots: int) -> int:
        new = min(args.max_new_tokens, slots - 1)
        filled = with_flags(args, cache_size=slots, max_new_tokens=new)
        return simulate(rehearse, filled, checkpoint, slots - new, gpu).reserved

    limit = checkpoint.args.block_size
    base, one_more = (resident_with(with_flags(args, cache_size=n * BLOCK), checkpoint) for n in (1, 2))
    square = 0 if args.linear_causal_mask else 1
    per_slot = (one_more - base - square * 3 * BLOCK**2) / BLOCK
    kept = lambda slots: base + per_slot * (slots - BLOCK) + square * (slots**2 - BLOCK**2)  # noqa: E731
    sizes = [n for n in (*range(BLOCK, limit, BLOCK), limit) if kept(n) <= gpu.usable]
    above, low, high = 0, -1, len(sizes)  # places in sizes: low fits, high does not
    while high - low > 1:
        fitting = sum(kept(n) + above <= gpu.usable for n in sizes)  # so many should fit
        middle = min(max(fitting - 1, low + 1), high - 1)
        reserved = peak(sizes[middle])
        low, high = (middle, high) if reserved <= gpu.usable else (low, middle)
        above = reserved - kept(sizes[middle])
    return sizes[low] if low >= 0 else 0


def find_gpu(flag: str, text: str) -> Gpu:
    """A card by its name, or the beginning of one; or by its gigabytes, where the one of that size counts that leaves
    least."""
    name = text.lower()
    found = [GPUS[name]] if name in GPUS else [g for n, g in GPUS.items() if n.startswith(name)] if name else []
    if len(found) == 1:
        return found[0]
    try:
        gb = float(name.removesuffix("gb"))
    except ValueError:
        gb = math.nan
    if not CONTEXT / 1e9 < gb < 10**6:
        raise ValueError(f"{flag} {text}: neither a number of GB above {CONTEXT / 1e9} nor a known card: {', '.join(GPUS)}")
    same = [g for g in GPUS.values() if g.marketed_gb == gb]
    if same:
        return min(same, key=lambda g: g.visible)
    return Gpu(f"a card of {gb:g} GB", round(gb), int(gb * 1e9), (8, 0))


def fit_table(rehearse: Rehearse, args, checkpoint: Checkpoint, gpu: Gpu) -> Iterator[str]:
    """The lines of `--fit`: the largest context for the flags given, then for every weight scheme and cache kind."""
    limit, mask = checkpoint.args.block_size, "linear" if args.linear_causal_mask else "square"
    known = {}

    def largest(scheme: str | None, kind: str) -> int:
        """-1: the model has no layers that the scheme can take."""
        if (scheme, kind) not in known:
            flags = with_flags(
                args,
                quantization=scheme,
                keep_head=args.keep_head and scheme is not None,
                kv_cache_quantization=None if kind == "plain" else kind,
            )
            try:
                known[scheme, kind] = largest_context(rehearse, flags, checkpoint, gpu)
            except ValueError:
                known[scheme, kind] = -1
        return known[scheme, kind]

    yield f"{checkpoint.args.name} on {gpu.name}, {gpu.usable / 1e9:.2f} GB usable beside the CUDA context: slots that fit"
    estimate = "; an ESTIMATE: compiled code is run uncompiled" if args.compile or args.compile_prefill else ""
    yield f"of {limit:,}, filled in chunks of {args.prefill_chunk}, {mask} mask{estimate}"
    yield ""
    yield f"  {'weights':14}" + "".join(f"{f'{kind} cache':>14}" for kind in KV_CACHES)
    for scheme in [args.quantization] if checkpoint.quantization else [None, *QUANTIZERS]:
        cells = [largest(scheme, kind) for kind in KV_CACHES]
        yield f"  {scheme or args.precision:14}" + "".join(
            f"{f'{n:,}' if n > 0 else 'none' if n == 0 else 'not possible':>14}" for n in cells
        )
    yield ""
    given, most = known[args.quantization, cache_form(args)[0]], max(known.values())
    whole = " (the model's whole context)"
    yield f"with the flags given: {f'--cache_size {given}{whole * (given == limit)}' if given > 0 else 'nothing fits'}"
    if most > given:
        scheme, kind = next(cell for cell, n in known.items() if n == most)  # the first: what changes the model least
        flags = [f"--cache_size {most}"] + [f"--quantization {scheme}"] * (scheme is not None)
        flags += [f"--kv_cache_quantization {kind}"] * (kind != "plain")
        yield f"the most: {' '.join(flags)}{whole * (most == limit)}"


# --- before a real run ---


def check_memory(rehearse: Rehearse, args, checkpoint: Checkpoint, T: int, device: torch.device) -> None:
    """Refuse, before anything is loaded, what cannot fit: on CUDA by the predicted peak against what is free, elsewhere by
    what must be there against the machine's memory. ValueError of one line, with what would fit."""
    if args.force:
        return
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        free += torch.cuda.memory_reserved(device)
        gpu = Gpu(name, 0, free + CONTEXT, capability)  # the context is there already
        try:
            refuse_what_cannot_fit(rehearse, args, checkpoint, T, gpu)
        except RuntimeError as e:  # a torch that simulates something in another way shall not stop a run that may well fit
            say(f"note: the run's memory could not be predicted ({' '.join(str(e).split())[:200]})")
        return
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def needed(args) -> int:
        size = resident_with(args, checkpoint)  # weights of a file may stay there, mapped
        return size if args.random_weights else size - resident_with(with_flags(args, cache_size=1), checkpoint)

    if needed(args) > total:
        what = "caches, mask and random weights" if args.random_weights else "caches and mask"
        raise ValueError(
            f"{what} for {args.batch_size} x {args.cache_size} slots take {needed(args) / 1e9:.1f} GB, and the "
            f"{device.type} has {total / 1e9:.1f} GB in all: {first_that_fits(args, checkpoint, T, needed, total)}"
        )


def first_that_fits(args, checkpoint: Checkpoint, T: int, needed: Callable, total: int) -> str:
    """The cheapest change of flags by arithmetic alone."""
    for text, flags in (*cheaper(args, checkpoint, T), ("a smaller --cache_size", dict(cache_size=1))):
        with suppress(ValueError):
            if needed(with_flags(args, **flags)) <= total:
                return f"it may fit with {text}"
    return "no change of flags makes it fit"


def refuse_what_cannot_fit(rehearse: Rehearse, args, checkpoint: Checkpoint, T: int, gpu: Gpu) -> None:
    """ValueError for a command whose predicted peak is more than the card has free."""
    p = simulate(rehearse, args, checkpoint, T, gpu)
    if p.spare(gpu) < 0:
        raise ValueError(
            f"needs {p.reserved / 1e9:.2f} GB on the card at its peak (phase '{p.at_peak[0]}'), {gpu.usable / 1e9:.2f} GB "
            f"are free on {gpu.name}: {suggestion(rehearse, args, checkpoint, T, gpu)}; --force tries it all the same"
        )
