"""What a run measured: samples and their rates, peak memory, the result line. GB = 1e9 bytes everywhere."""

import json
import os
import platform
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import torch

from attention import BLOCK
from model import Transformer


@dataclass
class Sample:
    """What one generation produced: token ids per row (stop tokens left out) and when each step's tokens were read, in
    seconds since the start. Rates exclude set-up, warm-up and compilation."""

    prompt_tokens: int
    rows: list[list[int]]
    ttft_s: float | None = None
    times: list[float] = field(default_factory=list)
    ended: str | None = None  # why it ended before its time

    @property
    def new_tokens(self) -> int:
        return sum(map(len, self.rows))

    @property
    def prefill_tok_s(self) -> float | None:
        """Prompt tokens of all rows / time to first token."""
        return len(self.rows) * self.prompt_tokens / self.ttft_s if self.ttft_s else None

    @property
    def decode_tok_s(self) -> float | None:
        """(n - 1) tokens of every row / time from the first token to the last one shown."""
        steps, after_first = max(map(len, self.rows)), sum(max(len(r) - 1, 0) for r in self.rows)
        return after_first / (self.times[steps - 1] - self.times[0]) if after_first and self.times else None


# --- devices ---


def pick_device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name}: not a device; use cpu, cuda, cuda:N or mps") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"--device {name}: no CUDA here (this torch is {torch.__version__}); use --device cpu")
        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices")
        torch.cuda.set_device(device.index or 0)  # events and streams that name no device are this one's
        return torch.device("cuda", device.index or 0)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("--device mps: no Metal device here; use --device cpu")
    if device.type not in ("cpu", "mps"):
        raise ValueError(f"--device {name}: use cpu, cuda, cuda:N or mps")
    return device


def check_compiler(device: torch.device) -> None:
    """torch.compile fails late and at length where it cannot build what it writes."""
    if device.type != "cpu":
        return
    if not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")))):
        raise ValueError("--compile: needs a C++ compiler (g++ or clang++) for the CPU, and none is installed")
    if " " in torch.__file__:
        raise ValueError("--compile: torch cannot link what it compiles from a path with a space: move the repository")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_available():  # a simulated one runs nothing
        torch.cuda.synchronize()


def peak_memory(device: torch.device) -> tuple[int, str]:
    """Peak bytes so far and their source: what torch reserved on the card, or the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device), "cuda"
    try:  # not ru_maxrss on Linux: it starts with the parent's peak
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024, "rss"
    except (OSError, IndexError):
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "rss"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def commit() -> str | None:
    """Short hash of the checked-out commit, with "-dirty" if files differ from it; None outside a git checkout."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def mean(values: list[float | None]) -> float | None:
    values = [v for v in values if v is not None]
    return statistics.fmean(values) if values else None


def result_line(
    model: Transformer, args, samples: list[Sample], compile_s: float | None, peak: tuple[int, str], device: str
) -> dict:
    """What --write_result appends; `peak` is bytes and their source, `device` a name. GB = 1e9 bytes, seconds, tokens per
    second; an unknown rate is None."""
    rates = [s.decode_tok_s for s in samples if s.decode_tok_s is not None]
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": commit(),
        "command": shlex.join(["python", *sys.argv]),
        "model": model.args.name,
        "quantization": args.quantization,
        "keep_head": args.keep_head,
        "kv_cache_quantization": args.kv_cache_quantization,
        "linear_causal_mask": args.linear_causal_mask,
        "cache_size": args.cache_size,
        "prefill_chunk": args.prefill_chunk,
        "prompt_tokens": samples[0].prompt_tokens,
        "new_tokens": sum(s.new_tokens for s in samples),
        "batch_size": args.batch_size,
        "ttft_s": mean([s.ttft_s for s in samples]),
        "prefill_tok_s": mean([s.prefill_tok_s for s in samples]),
        "decode_tok_s": mean(rates),
        "decode_tok_s_sd": statistics.stdev(rates) if len(rates) > 1 else None,
        "num_samples": len(samples),
        "model_gb": model.weight_bytes() / 1e9,
        "kv_cache_gb": model.kv_cache_bytes() / 1e9,
        "peak_memory_gb": peak[0] / 1e9,
        "peak_memory_source": peak[1],
        "device": model.norm.weight.device.type,
        "device_name": device,
        "precision": args.precision,
        "compile": args.compile,
        "compile_prefill": args.compile_prefill,
        "compile_s": compile_s,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def say(text: str) -> None:
    """A line on stderr. Where nobody reads it any more (`2>&1 | head`), the run goes on and its result is written."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def amount(value: float | None, unit: str, digits: int = 1) -> str:
    return "n/a" if value is None else f"{value:.{digits}f} {unit}"


def report_sample(number: int, s: Sample) -> None:
    say(
        f"sample {number}: {s.prompt_tokens} prompt tokens, first token after {amount(s.ttft_s, 's', 3)}, "
        f"prefill {amount(s.prefill_tok_s, 'tok/s')}; {s.new_tokens} new tokens, decode {amount(s.decode_tok_s, 'tok/s')}"
        + (f" ({s.ended})" if s.ended else "")
    )


def report_run(r: dict, path: str | None) -> None:
    """The mean of several samples, and memory; the result line into a file."""
    if r["num_samples"] > 1:
        spread = f" (standard deviation {r['decode_tok_s_sd']:.1f})" if r["decode_tok_s_sd"] is not None else ""
        say(
            f"mean of {r['num_samples']} samples: first token after {amount(r['ttft_s'], 's', 3)}, prefill "
            f"{amount(r['prefill_tok_s'], 'tok/s')}, decode {amount(r['decode_tok_s'], 'tok/s')}{spread}"
        )
    kind = r["kv_cache_quantization"] or "plain"
    source = {"cuda": "reserved on the card", "rss": "resident in the process"}[r["peak_memory_source"]]
    say(
        f"memory: model {r['model_gb']:.3f} GB, {kind} KV cache {r['kv_cache_gb']:.3f} GB for {r['cache_size']} slots "
        f"(in blocks of {BLOCK}), peak {r['peak_memory_gb']:.3f} GB {source} (GB = 1e9 bytes)"
    )
    write_result(r, path)


def write_result(r: dict, path: str | None) -> None:
    """Append the result line to a file. One that cannot be written goes to stderr."""
    if path is None:
        return
    try:
        with open(path, "a") as f:
            f.write(json.dumps(r) + "\n")
    except OSError as e:
        say(json.dumps(r))
        raise OSError(f"--write_result {path}: {e.strerror}; the line stands above") from None
