"""Generate text with Llama from the command line: text on stdout, everything else on stderr.

Reads top to bottom: sampling, decoding, measuring, the command line. `python generate.py --help` lists the flags.
"""

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import predict
from attention import KV_CACHES, PREFILL_ROWS
from checkpoint import configuration, open_checkpoint, random_checkpoint
from cli import Parser, check_writable, print_lines, real, run, whole
from entries import Checkpoint, Entry
from inputs import fit_lengths, prompt_ids
from measure import (
    Sample,
    check_compiler,
    device_name,
    peak_memory,
    pick_device,
    report_run,
    report_sample,
    result_line,
    say,
    synchronize,
    write_result,
)
from memory import GPUS, Card, Watch, empty_cache
from model import Transformer, prefill_plan, transformer_configs
from quantize import QUANTIZERS, chosen_scheme, load_model
from snapshot import Recorder, quiet, simulated_snapshot, write_snapshot
from tokenizer import Tokenizer, load_tokenizer

# --- sampling ---


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is argmax; top_k 0 and top_p 1 are off."""

    temperature: float = 0.8
    top_k: int = 200
    top_p: float = 1.0


def logits_to_probs(logits: Tensor, s: Sampling) -> Tensor:
    """[B, V] logits of any dtype -> [B, V] float32 probabilities, for a temperature above 0."""
    logits = logits.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / s.temperature  # the maximum is 0: a tiny temperature cannot overflow
    if s.top_k and s.top_k < logits.shape[-1]:  # by index, not by value: ties are common in bfloat16
        kept = torch.topk(logits, s.top_k, dim=-1)
        logits = torch.full_like(logits, -torch.inf).scatter_(-1, kept.indices, kept.values)
    probs = torch.softmax(logits, -1)
    if s.top_p < 1:  # keep the most probable tokens until their sum reaches top_p (Holtzman et al., 2020); one at least
        ordered, index = torch.sort(probs, -1, descending=True)
        before = ordered.cumsum(-1) - ordered
        ordered = torch.where(before < s.top_p, ordered, 0)
        probs = torch.zeros_like(probs).scatter_(-1, index, ordered)
    return probs


def sample(logits: Tensor, s: Sampling) -> Tensor:
    """[B, V] -> [B, 1] int64. The largest of probability / Exp(1) noise is a draw from the distribution, without the wait
    for the device that torch.multinomial takes."""
    if s.temperature < 1e-30:  # 0, or what float32 cannot divide by
        return logits.argmax(-1, keepdim=True)
    probs = logits_to_probs(logits, s)
    noise = torch.empty_like(probs).exponential_().clamp_(min=1e-30)
    return (probs / noise).argmax(-1, keepdim=True)


# --- decoding ---


def run_tiles(model: Transformer, tokens: list[Tensor], positions: list[Tensor]) -> list[Tensor]:
    """The prefill phase of one or more tiles; what --compile_prefill compiles, a tile at a time."""
    return model(tokens, positions, decode=False)


def chunks(T: int, chunk: int, watch: Watch) -> Iterator[tuple[list[tuple[int, int, int, int]], bool]]:
    """The chunks of `prefill_plan`, each with whether it is the last. The watch is told where the program is; a simulated
    card leaves out chunks whose tiles equal those of others, except for the last one."""
    count = -(-T // chunk)
    key = lambda item: None if item[0] == count else tuple(height for _, height, _, _ in item[1])  # noqa: E731
    for i, parts in watch.distinct(enumerate(prefill_plan(T, chunk), 1), key):
        watch.phase = f"prefill chunk {i} of {count}"
        yield parts, i == count
    watch.phase = "decode"


def prefill(
    model: Transformer,
    prompt: Tensor,
    chunk: int,
    watch: Watch | None = None,
    run: Callable = run_tiles,
    single: bool = False,
) -> Tensor:
    """Process a prompt [B, T] (int64, on the host) in chunks, writing the caches. Returns the last position's logits
    [B, V]. `single`: call `run` for one tile at a time, so that a compiled one sees only len(TILE_HEIGHTS) shapes."""
    device = model.norm.weight.device
    for parts, last in chunks(prompt.shape[1], chunk, watch or Watch()):
        tokens, positions = [], []
        for base, height, first, stop in parts:
            rows = torch.zeros(len(prompt), height, dtype=torch.int64)
            rows[:, first:stop] = prompt[:, base + first : base + stop]
            tokens.append(rows.to(device))
            positions.append(torch.tensor([base, first, stop]).to(device))
        if single:
            xs = [run(model, [t], [p])[0] for t, p in zip(tokens, positions, strict=True)]
        else:
            xs = run(model, tokens, positions)
        if not last:
            del xs, tokens, positions  # before those of the next chunk are made
    return model.logits(xs[-1].narrow(1, stop - 1, 1)).squeeze(1)


def decode_one_token(model: Transformer, token: Tensor, pos: Tensor, sampling: Sampling) -> Tensor:
    """token [B, 1] at position pos[0] (pos int64 [3], see model.Tile) -> the next token [B, 1]."""
    (x,) = model([token], [pos], decode=True)
    return sample(model.logits(x).squeeze(1), sampling)


@dataclass(frozen=True)
class Steps:
    """The two phases as callables: eager, or what torch.compile made of them."""

    prefill: Callable = prefill
    decode: Callable = decode_one_token


def generate(
    model: Transformer, prompt: Tensor, max_new_tokens: int, sampling: Sampling, chunk: int, steps: Steps,
    watch: Watch | None = None,
) -> Iterator[Tensor]:
    """Yield max_new_tokens tokens [B, 1] after the prompt [B, T], each on the device and possibly still being computed.
    `model.setup_caches` was called for T + max_new_tokens slots. The caller decides when to stop, and reads the tokens."""
    device = model.norm.weight.device
    token = sample(steps.prefill(model, prompt, chunk, watch), sampling)
    pos, step = torch.tensor([prompt.shape[1], 0, 1]).to(device), torch.tensor([1, 0, 0]).to(device)
    for i in range(max_new_tokens):
        if i:
            token = steps.decode(model, token, pos, sampling).clone()  # a CUDA graph's next replay overwrites its output
            pos.add_(step)
        yield token


def compile_steps(device: torch.device, decode: bool, tiles: bool) -> Steps:
    """Compile one static graph for decode and one per tile height for prefill, without a graph break."""
    compiled = partial(
        torch.compile, fullgraph=True, dynamic=False, mode="reduce-overhead" if device.type == "cuda" else None
    )
    steps = Steps()
    return Steps(
        prefill=partial(prefill, run=compiled(run_tiles), single=True) if tiles else steps.prefill,
        decode=compiled(decode_one_token) if decode else steps.decode,
    )


def read_tokens(steps: Iterator[Tensor], device: torch.device) -> Iterator[list[int]]:
    """Each step's tokens as a list of B ints. On CUDA the next step is queued before the last is waited for (but for the
    first, whose arrival is the time to first token); elsewhere nothing is queued, so nothing is run ahead."""
    if device.type != "cuda":
        for token in steps:
            yield token.flatten().tolist()
        return
    pending = None
    for i, token in enumerate(steps):
        host = torch.empty(token.shape, dtype=token.dtype, pin_memory=True).copy_(token, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        if pending is not None:
            pending[1].synchronize()
            yield pending[0].flatten().tolist()
        pending = (host, arrived)
        if i == 0:
            arrived.synchronize()
            yield host.flatten().tolist()
            pending = None
    if pending is not None:
        pending[1].synchronize()
        yield pending[0].flatten().tolist()


# --- one sample ---


def emit(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class Printer:
    """Shows rows as text, or as ids where there is no tokenizer. One row streams; several would mix, so each is printed
    when all are done. Every row ends with a newline."""

    def __init__(self, tokenizer: Tokenizer | None, batch_size: int):
        self.tokenizer, self.streams, self.shown = tokenizer, batch_size == 1, 0
        self.stream = tokenizer.stream() if tokenizer else None

    def push(self, token: int) -> None:
        if self.streams:
            emit(self.stream.push(token) if self.stream else f"{' ' if self.shown else ''}{token}")
            self.shown += 1

    def finish(self, rows: list[list[int]]) -> None:
        if self.streams:
            emit((self.stream.flush() if self.stream else "") + "\n")
        else:
            for row in rows:
                emit((self.tokenizer.decode(row) if self.tokenizer else " ".join(map(str, row))) + "\n")


def run_sample(model, prompt: Tensor, args, sampling: Sampling, steps: Steps, stop_ids, printer, watch: Watch) -> Sample:
    """Generate once: stop, show and time. Ctrl-C keeps what was read so far."""
    device, begin = model.norm.weight.device, time.perf_counter()
    result = Sample(prompt.shape[1], [[] for _ in prompt])
    open_rows = set(range(len(prompt)))
    try:
        tokens = generate(model, prompt, args.max_new_tokens, sampling, args.prefill_chunk, steps, watch)
        for step in read_tokens(tokens, device):
            result.times.append(time.perf_counter() - begin)
            result.ttft_s = result.times[0]
            open_rows -= {b for b in open_rows if step[b] in stop_ids}
            for b in open_rows:
                result.rows[b].append(step[b])
            if 0 in open_rows:
                printer.push(step[0])
            if not open_rows:
                break
        if args.max_new_tokens == 0:
            synchronize(device)
            result.ttft_s = time.perf_counter() - begin
    except KeyboardInterrupt:
        result.ended = "interrupted"
    except BrokenPipeError:  # whoever read our text has gone (`| head`): stop, but still report
        result.ended = "stdout closed"
    try:
        printer.finish(result.rows)
    except BrokenPipeError:  # after Ctrl-C in a pipeline too: the signal goes to all of it
        result.ended = result.ended or "stdout closed"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains at its exit
    return result


def run_samples(
    model, prompt: Tensor, args, sampling: Sampling, steps: Steps, tokenizer: Tokenizer | None, watch: Watch
) -> tuple[list[Sample], str | None]:
    """Generate and report --num_samples times. Returns the samples, and why they ended early or None. Ctrl-C between two
    samples keeps those that are done; before the first there is nothing to keep."""
    stop_ids = frozenset() if tokenizer is None or args.ignore_eos else tokenizer.stop_ids
    samples = []
    torch.manual_seed(args.seed)
    try:
        while len(samples) < args.num_samples and not (samples and samples[-1].ended):
            printer = Printer(tokenizer, args.batch_size)
            samples.append(run_sample(model, prompt, args, sampling, steps, stop_ids, printer, watch))
            report_sample(len(samples), samples[-1])
    except KeyboardInterrupt:
        if not samples:
            raise
        return samples, "interrupted"
    return samples, samples[-1].ended


def run_through(tokens: Iterator[Tensor], watch: Watch) -> None:
    """Take all tokens; on a simulated card, up to where the steps repeat each other."""
    states = set()
    for _ in tokens:
        if watch.repeats(states):
            return


def warm_up(model, prompt: Tensor, args, sampling, steps: Steps, watch: Watch | None = None) -> float:
    """Run the shapes that the prompt needs once: compiles them, reads mapped weights from disk. Returns seconds."""
    begin, T = time.perf_counter(), prompt.shape[1]
    lengths = {T % PREFILL_ROWS or PREFILL_ROWS}
    if args.compile_prefill:
        lengths.add(min(T, PREFILL_ROWS))
    for length in lengths:
        logits = steps.prefill(model, prompt[:, :length], length)
        finite = logits.isfinite().all()
        if not args.dry_run and not finite:
            raise ValueError("the model's logits are not finite: damaged weights, or numbers too large for --precision")
        new = min(args.max_new_tokens, 4)
        run_through(generate(model, prompt[:, :length], new, sampling, length, steps), watch or Watch())
    if not args.dry_run:
        synchronize(model.norm.weight.device)
    return time.perf_counter() - begin


def rehearse(card: Card, checkpoint: Checkpoint, args, T: int) -> Transformer:
    """What `main` does to a card's memory, on a simulated one: load, set up, warm up, generate. Returns the model."""
    args, memo = argparse.Namespace(**vars(args) | {"dry_run": True}), {}
    if args.random_weights is not None:
        checkpoint = random_checkpoint(checkpoint.args, card.device)

    def visit(entry: Entry, spans):  # the blocks of a tensor; those of other layers' tensors of that kind are like them
        kind = re.sub(r"^layers\.\d+", "", entry.name), entry.shape, entry.dtype
        return card.distinct(spans, lambda span: (kind, span[0].dtype, span[2] - span[1]), memo)

    model = set_up(args, checkpoint.hollow(visit), card.device, card)[0]
    predict.watch_model(model, card)
    prompt, steps = torch.zeros(args.batch_size, T, dtype=torch.int64), Steps()
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    card.phase = "warm-up"
    warm_up(model, prompt, args, sampling, steps, card)
    for _ in card.distinct(range(args.num_samples), lambda i: "sample"):
        run_through(generate(model, prompt, args.max_new_tokens, sampling, args.prefill_chunk, steps, card), card)
    return model


# --- the command line ---

PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DEFAULT_CHECKPOINT = "checkpoints/SmolLM2-135M-Instruct"
DEFAULT_GPU = "a100-80"
NOT_BUILT = ("--interactive",)


def build_parser() -> Parser:
    p = Parser("generate.py", description=__doc__.splitlines()[0])
    add = p.add_argument
    source = p.add_mutually_exclusive_group()
    source.add_argument("--checkpoint_path", default=DEFAULT_CHECKPOINT, metavar="PATH", help="a Hugging Face or "
                        "Meta folder, a model.pth, a .gguf file, or our own format (default: %(default)s)")
    source.add_argument("--random_weights", metavar="NAME", help="no checkpoint: a configuration with random weights; "
                        "prints token ids. A config.json or params.json, or one of: " + ", ".join(transformer_configs))
    text = p.add_mutually_exclusive_group()
    text.add_argument("--prompt", metavar="TEXT", help='taken literally (default: "Hello, my name is")')
    text.add_argument("--prompt_file", metavar="FILE", help="taken byte for byte; - is stdin")
    text.add_argument("--prompt_tokens", type=whole(1), metavar="N", help="N varied token ids from a fixed seed (default "
                      "with --random_weights: 6)")
    add("--chat", action="store_true", help="the prompt is one user turn in the checkpoint's chat template")
    add("--system", metavar="TEXT", help="a system message, with --chat")
    add("--max_new_tokens", type=whole(0), default=200, metavar="N", help="default: %(default)s")
    add("--num_samples", type=whole(1), default=1, metavar="N", help="generate N times, and average the rates")
    add("--batch_size", type=whole(1), default=1, metavar="N", help="N rows of the same prompt at once; printed "
        "one after another at the end")
    add("--temperature", type=real(0, 1e6), default=0.8, metavar="X", help="0 is greedy (default: %(default)s)")
    add("--top_k", type=whole(0), default=200, metavar="N", help="0 is off (default: %(default)s)")
    add("--top_p", type=real(1e-9, 1), default=1.0, metavar="X", help="1 is off (default: %(default)s)")
    add("--seed", type=whole(0), default=1234, metavar="N", help="default: %(default)s")
    add("--ignore_eos", action="store_true", help="go on after a stop token, up to --max_new_tokens")
    add("--quantization", choices=QUANTIZERS, metavar="SCHEME", help="quantize the weights while loading: " + ", ".join(
        QUANTIZERS) + "; the number is the group that shares a scale and a minimum (a file of quantize.py needs no flag)")
    add("--keep_head", action="store_true", help="with --quantization: leave head and embedding in float")
    add("--kv_cache_quantization", nargs="?", const="int8", choices=[k for k in KV_CACHES if k != "plain"],
        help="keep the KV cache quantized (the bare flag means int8)")
    add("--linear_causal_mask", action=argparse.BooleanOptionalAction, default=True, help="derive the causal mask from "
        "positions (default); --no-linear_causal_mask builds the square mask for comparison")
    add("--cache_size", type=whole(1), metavar="N", help="slots of the KV cache (default: just what the run needs)")
    add("--prefill_chunk", type=whole(1), default=512, metavar="N", help="prompt tokens per step; never changes the "
        "result. Best a multiple of 256: each step computes whole tiles (default: %(default)s)")
    add("--compile", action="store_true", help="torch.compile decode: one graph")
    add("--compile_prefill", action="store_true", help="torch.compile prefill: one graph per tile height")
    add("--device", metavar="NAME", help="cpu, cuda, cuda:N or mps (default: cuda if present, else cpu)")
    add("--precision", type=lambda t: t.removeprefix("torch."), choices=PRECISIONS, default="bfloat16",
        help="dtype of weights and activations (default: %(default)s)")
    add("--dry_run", action="store_true", help="print what this command would take of a card's memory; needs no card, and "
        "reads no weights")
    add("--gpu", metavar="GPU_OR_GB", help=f"with --dry_run: the card to simulate (default: {DEFAULT_GPU}). One of: "
        + ", ".join(GPUS) + "; or a number, for the least of that size")
    add("--fit", metavar="GPU_OR_GB", help="print the largest --cache_size, filled, that fits a card, for every weight "
        "scheme and cache kind")
    add("--force", action="store_true", help="run even if the predicted peak is more than the card has free")
    add("--memory_profile", metavar="FILE", help="write every allocation as a snapshot, for scripts/plot_memory.py")
    add("--write_result", metavar="FILE", help="append the measurements as one line of JSON")
    add("--profile", metavar="FILE", help="write a chrome trace of one more generation, which is not measured")
    return p  # fmt: skip


def find_model(args, device: torch.device) -> tuple[Checkpoint, Tokenizer | None]:
    """The checkpoint and its tokenizer; settles --quantization, since a file may be quantized already."""
    if args.random_weights is not None:
        checkpoint, tokenizer = random_checkpoint(configuration(args.random_weights), device), None
    else:
        path = Path(args.checkpoint_path)
        if args.checkpoint_path == DEFAULT_CHECKPOINT and not path.exists():  # started in another folder
            path = Path(__file__).parent / DEFAULT_CHECKPOINT
        checkpoint = open_checkpoint(path)
        tokenizer = load_tokenizer(checkpoint.tokenizer_source)
    args.quantization, args.keep_head = chosen_scheme(checkpoint, args.quantization, args.keep_head)
    return checkpoint, tokenizer


def profile_generation(path: str, model: Transformer, prompt: Tensor, args, sampling: Sampling, steps: Steps) -> None:
    """Run once more under torch's profiler, and write what it saw for chrome://tracing or Perfetto."""
    profiler = torch.profiler.profile()
    with quiet():
        profiler.start()
    run_through(generate(model, prompt, args.max_new_tokens, sampling, args.prefill_chunk, steps), Watch())
    synchronize(model.norm.weight.device)
    with quiet():
        profiler.stop()
    profiler.export_chrome_trace(path)
    say(f"profile: {path}")


def check_flags(args) -> None:
    """What contradicts itself, and files that cannot be written."""
    simulated = "--fit" if args.fit is not None else "--dry_run"
    if args.fit is not None or args.dry_run:
        if args.profile is not None:
            raise ValueError(f"{simulated} runs nothing that could be profiled: leave --profile out")
        if args.device is not None and not re.fullmatch(r"cuda(:\d+)?", args.device):
            raise ValueError(f"{simulated} simulates a CUDA card: leave --device {args.device} out")
    if args.fit is not None:
        for flag in ("cache_size", "prompt", "prompt_file", "prompt_tokens", "memory_profile", "write_result"):
            if getattr(args, flag) is not None:
                raise ValueError(f"--fit looks for the largest --cache_size and fills it: leave --{flag} out")
        for flag in ("dry_run", "chat", "system", "gpu"):
            if getattr(args, flag):
                raise ValueError(f"--fit simulates with prompts of its own: leave --{flag} out")
    elif args.gpu is not None and not args.dry_run:
        raise ValueError("--gpu names the card of --dry_run: give that too, or leave it out")
    if args.profile is not None and args.memory_profile is not None:
        raise ValueError("--profile and --memory_profile each need a run of their own: leave one out")
    if args.memory_profile is not None and args.memory_profile == args.write_result:
        raise ValueError(f"--memory_profile {args.memory_profile}: --write_result names the same file")
    for flag in ("write_result", "profile", "memory_profile"):
        check_writable(f"--{flag}", getattr(args, flag))


def say_profile(path: str | None) -> None:
    if path is not None:
        say(f"memory profile: {path} (to draw it: python scripts/plot_memory.py {shlex.quote(path)})")


def dry_run(args, checkpoint: Checkpoint, T: int) -> int:
    """Record what the command would take on a card, and print it. Status 0: "does not fit" is an answer."""
    gpu = predict.find_gpu("--gpu", args.gpu or DEFAULT_GPU)
    predict.resident_with(args, checkpoint)  # refuses what is too much to be counted
    p = predict.simulate(rehearse, args, checkpoint, T, gpu)
    result = result_line(p.model, args, [Sample(T, [[]])], None, (p.reserved, "simulated"), gpu.name)
    asked = {"num_samples": args.num_samples, "new_tokens": args.max_new_tokens * args.batch_size * args.num_samples}
    write_result(result | asked | p.record(), args.write_result)
    if args.memory_profile is not None:
        write_snapshot(args.memory_profile, simulated_snapshot(p.card))
        say_profile(args.memory_profile)
    print_lines(predict.table(p, args, checkpoint, T))
    if p.spare(gpu) < 0:
        print_lines([f"  on {gpu.name}: {predict.suggestion(rehearse, args, checkpoint, T, gpu)}"])
    return 0


def set_up(args, checkpoint: Checkpoint, device: torch.device, watch: Watch) -> tuple[Transformer, str | None]:
    """Load the weights and allocate everything else."""
    watch.phase, watch.scope = "load", "loading"
    dtype = PRECISIONS[args.precision]
    model, note = load_model(checkpoint, device, dtype, args.quantization, args.keep_head)
    empty_cache(device, watch)  # what the blocks of rows went through
    predict.name_parts(model, watch)
    watch.phase, watch.scope = "set-up", "activations"
    model.setup_caches(args.batch_size, args.cache_size, *predict.cache_form(args))
    predict.name_parts(model, watch)
    return model, note


def run_all(args, checkpoint: Checkpoint, tokenizer: Tokenizer | None, ids: list[int], device: torch.device, watch) -> int:
    """Load, generate, report. Returns the exit status."""
    model, note = set_up(args, checkpoint, device, watch)
    if note:
        say(note)
    sampling, prompt = Sampling(args.temperature, args.top_k, args.top_p), torch.tensor([ids] * args.batch_size)
    steps = compile_steps(device, args.compile, args.compile_prefill)
    watch.phase = "warm-up"
    warm_s = warm_up(model, prompt, args, sampling, steps, watch)
    compile_s = warm_s if args.compile or args.compile_prefill else None
    if compile_s is not None:
        say(f"compiled in {compile_s:.1f} s")
    samples, ended = run_samples(model, prompt, args, sampling, steps, tokenizer, watch)
    result = result_line(model, args, samples, compile_s, peak_memory(device), device_name(device))
    report_run(result, args.write_result)
    if args.profile is not None and not ended:
        profile_generation(args.profile, model, prompt, args, sampling, steps)
    return 130 if ended == "interrupted" else 0


def main(args: argparse.Namespace) -> int:
    """Check everything that can be checked before anything is loaded; then predict, or run. Returns the exit status."""
    check_flags(args)
    simulated = args.dry_run or args.fit is not None
    device = torch.device("cpu") if simulated else pick_device(args.device)
    if not simulated and (args.compile or args.compile_prefill):
        check_compiler(device)
    checkpoint, tokenizer = find_model(args, device)
    if args.fit is not None:
        print_lines(predict.fit_table(rehearse, args, checkpoint, predict.find_gpu("--fit", args.fit)))
        return 0
    ids = prompt_ids(args, checkpoint.args, tokenizer)
    length_note = fit_lengths(args, checkpoint.args, len(ids))
    if not args.dry_run:
        predict.check_memory(rehearse, args, checkpoint, len(ids), device)
    if length_note:
        say(length_note)
    if args.dry_run:
        return dry_run(args, checkpoint, len(ids))
    if args.memory_profile:
        say("note: every allocation is recorded, which takes time and memory: rates and peak are those of a recorded run")
    with Recorder(args.memory_profile, device) as watch:
        status = run_all(args, checkpoint, tokenizer, ids, device, watch)
    say_profile(args.memory_profile)
    return status


def cli(argv: list[str]) -> int:
    parser = build_parser()
    for flag in argv:
        if flag.split("=")[0] in NOT_BUILT:
            parser.error(f"{flag.split('=')[0]} is not built yet")
    return run(parser, main, argv)


if __name__ == "__main__":
    sys.exit(cli(sys.argv[1:]))
