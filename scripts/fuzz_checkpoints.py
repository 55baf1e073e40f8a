"""Damages small checkpoints of every format and loads them: python scripts/fuzz_checkpoints.py --count 2000 --seed 0

Each variant must load, or be refused by a ValueError of one line: no other exception, no warning, no crash, no hang, and no
memory beyond the size of its files and 200 MB. Child processes load, so that a crash is one more line of the report. A
variant follows from seed and number alone: --first 1234 --count 1 --keep FOLDER makes one again and keeps it.
"""

import argparse
import base64
import collections
import json
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
import warnings
import zipfile
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

# A script's own folder is on the path, not the repository's root, where the modules stand.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import quantize
from checkpoint import empty_model, open_checkpoint, write_checkpoint
from gguf_file import NAMES as GGUF_NAMES
from model import ModelArgs

CPU = torch.device("cpu")
SECONDS, BYTES = 20, 200 * 10**6  # a variant may take so long, and so much memory beyond its files
Weights = dict[str, torch.Tensor]


# --- one model in every format ---


def random_weights(args: ModelArgs, seed: int = 0, dtype: torch.dtype = torch.float32) -> Weights:
    """Under our names; with enough spread that logits differ, and norms apart from each other."""
    g = torch.Generator().manual_seed(seed)
    return {
        name: (torch.rand(shape, generator=g) + 0.5 if len(shape) == 1 else
               torch.randn(shape, generator=g) * 1.5 / shape[-1] ** 0.5).to(dtype)
        for name, shape in empty_model(args)[1].items()
    }  # fmt: skip


def unstacked(args: ModelArgs, weights: Weights) -> Weights:
    """Meta's names: q, k and v apart."""
    result, kv = {}, args.n_local_heads * args.head_dim
    for name, w in weights.items():
        if "wqkv" not in name:
            result[name] = w
            continue
        for part, rows in zip(("wq", "wk", "wv"), w.split([args.n_head * args.head_dim, kv, kv]), strict=True):
            result[name.replace("wqkv", part)] = rows
    return result


def hf_weights(args: ModelArgs, weights: Weights) -> Weights:
    """Hugging Face's names, and its order of the rows of q and k: those that Meta has in pairs lie half a head apart."""
    names = {
        "tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head", "wq": "self_attn.q_proj",
        "wk": "self_attn.k_proj", "wv": "self_attn.v_proj", "wo": "self_attn.o_proj", "w1": "mlp.gate_proj",
        "w2": "mlp.down_proj", "w3": "mlp.up_proj", "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    result = {}
    for name, w in unstacked(args, weights).items():
        *start, last = name.removesuffix(".weight").split(".")
        layer = f"model.layers.{start[1]}." if start else ""
        if last in ("wq", "wk"):
            w = w.unflatten(0, (-1, args.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        result[f"{layer}{names[last]}.weight"] = w.contiguous()
    return result


def hf_config(args: ModelArgs) -> dict:
    config = dict(
        model_type="llama", vocab_size=args.vocab_size, hidden_size=args.dim, intermediate_size=args.intermediate_size,
        num_hidden_layers=args.n_layer, num_attention_heads=args.n_head, num_key_value_heads=args.n_local_heads,
        rms_norm_eps=args.norm_eps, max_position_embeddings=args.block_size, rope_theta=args.rope_base, hidden_act="silu",
        tie_word_embeddings=args.tie_word_embeddings, head_dim=args.head_dim,
    )  # fmt: skip
    if (s := args.rope_scaling) is not None:
        config["rope_scaling"] = dict(
            rope_type="llama3", factor=s.factor, low_freq_factor=s.low_freq_factor, high_freq_factor=s.high_freq_factor,
            original_max_position_embeddings=s.original_max_position,
        )  # fmt: skip
    return config


def write_ours(folder: Path, args: ModelArgs, weights: Weights) -> Path:
    write_checkpoint(folder, args, weights.items())
    return folder


def write_quantized(folder: Path, args: ModelArgs, weights: Weights) -> Path:
    source = write_ours(folder.with_name(f"{folder.name}-source"), args, weights)
    checkpoint = open_checkpoint(source)
    model, _ = quantize.load_model(checkpoint, CPU, torch.float32, "int4wo-32")
    write_checkpoint(folder, args, model.state_dict().items(), quantization="int4wo-32")
    shutil.rmtree(source)
    return folder


def write_hf(folder: Path, args: ModelArgs, weights: Weights, shards: int = 1, suffix: str = ".safetensors") -> Path:
    """Shards with an index; q, k and v of a layer fall into different ones."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf_config(args)))
    tensors, stem = hf_weights(args, weights), "model" if suffix == ".safetensors" else "pytorch_model"
    save = save_file if suffix == ".safetensors" else torch.save
    if shards == 1:
        save(tensors, folder / f"{stem}{suffix}")
        return folder
    files = {name: f"{stem}-{i % shards + 1:05d}-of-{shards:05d}{suffix}" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save({n: t.clone() for n, t in tensors.items() if files[n] == file}, folder / file)
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def write_meta(folder: Path, args: ModelArgs, weights: Weights, shards: int = 1, columns: bool = True) -> Path:
    """columns: the embedding is cut along its columns, as Llama 2's, not its rows, as Llama 3's."""
    folder.mkdir(parents=True)
    params = dict(
        dim=args.dim, n_layers=args.n_layer, n_heads=args.n_head, n_kv_heads=args.n_local_heads, vocab_size=args.vocab_size,
        norm_eps=args.norm_eps, rope_theta=args.rope_base, multiple_of=args.intermediate_size, ffn_dim_multiplier=0.01,
    )  # fmt: skip
    (folder / "params.json").write_text(json.dumps(params))
    along = {"wo": 1, "w2": 1, "tok_embeddings": int(columns)}
    for i in range(shards):
        part = {
            name: w.clone() if w.ndim == 1 else w.chunk(shards, along.get(name.split(".")[-2], 0))[i].clone()
            for name, w in unstacked(args, weights).items()
        }
        torch.save(part | {"rope.freqs": torch.ones(args.head_dim // 2)}, folder / f"consolidated.{i:02d}.pth")
    return folder


def write_bare(folder: Path, args: ModelArgs, weights: Weights) -> Path:
    (folder / args.name).mkdir(parents=True)
    torch.save(weights, folder / args.name / "model.pth")
    return folder / args.name / "model.pth"


def write_gguf(folder: Path, args: ModelArgs, weights: Weights, kind: str = "Q8_0", rope_factors=None) -> Path:
    """Matrices in the type named, vectors in F32; a tokenizer of the 256 bytes and one merge."""
    folder.mkdir(parents=True)
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_block_count(args.n_layer)
    writer.add_context_length(args.block_size)
    writer.add_embedding_length(args.dim)
    writer.add_feed_forward_length(args.intermediate_size)
    writer.add_head_count(args.n_head)
    writer.add_head_count_kv(args.n_local_heads)
    writer.add_key_length(args.head_dim)
    writer.add_value_length(args.head_dim)
    writer.add_rope_dimension_count(args.head_dim)
    writer.add_rope_freq_base(args.rope_base)
    writer.add_layer_norm_rms_eps(args.norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    letters = [chr(i) if 33 <= i < 127 or 161 <= i < 173 or i > 173 else chr(256 + i) for i in range(256)]
    writer.add_token_list([*letters, "th", "<|begin_of_text|>", "<|end_of_text|>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL] * 2)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    for name, w in unstacked(args, weights).items():
        *start, last = name.removesuffix(".weight").split(".")
        theirs = f"blk.{start[1]}.{GGUF_NAMES['.'.join([*start[2:], last])]}" if start else GGUF_NAMES[last]
        type = gguf.GGMLQuantizationType["F32" if w.ndim == 1 else kind]
        writer.add_tensor(f"{theirs}.weight", gguf.quantize(w.float().numpy(), type), raw_dtype=type)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"


WRITERS = {
    "ours": write_ours,
    "ours, quantized": write_quantized,
    "Hugging Face": write_hf,
    "Hugging Face, shards": lambda *a: write_hf(*a, shards=3),
    "Hugging Face, .bin": lambda *a: write_hf(*a, suffix=".bin"),
    "Hugging Face, .bin shards": lambda *a: write_hf(*a, shards=2, suffix=".bin"),
    "Meta": write_meta,
    "Meta, shards": lambda *a: write_meta(*a, shards=2),
    "model.pth": write_bare,
    "GGUF": write_gguf,
    "GGUF, Q4_1": lambda *a: write_gguf(*a, kind="Q4_1"),
}


def write_all(folder: Path) -> dict[str, Path]:
    """A tiny model in every format, each with a tokenizer beside it: the path to give, by the format's name."""
    args = ModelArgs.from_name("tiny")
    weights, paths = random_weights(args, dtype=torch.bfloat16), {}
    tokens = b"".join(b"%s %d\n" % (base64.b64encode(bytes([i])), i) for i in range(256))
    for name, write in WRITERS.items():
        paths[name] = write(folder / name, args, weights)
        (paths[name] if paths[name].is_dir() else paths[name].parent).joinpath("tokenizer.model").write_bytes(tokens)
    return paths


# --- damage ---


def truncate(file: Path, rng: random.Random) -> None:
    size = file.stat().st_size
    os.truncate(file, rng.choice([0, 1, 7, 8, 100, 1000, size - 1, size - 100, rng.randrange(size)]) % (size + 1))


def _header_place(size: int, rng: random.Random) -> int:
    """Mostly in the first kilobytes, or at the end, where a zip file has its index."""
    reach = rng.choice([64, 512, 8192])
    return rng.randrange(min(reach, size)) if rng.random() < 0.7 else size - 1 - rng.randrange(min(reach, size))


def flip_bits(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 4, 32])):
        data[_header_place(len(data), rng)] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def huge_number(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice([1, 1, 3])):
        number = struct.pack("<Q", rng.choice([2**64 - 1, 2**63, 2**62, 2**40, 2**33, 2**32 - 1, 2**31, 10**9, 0]))
        place = _header_place(len(data), rng)
        number = number[: rng.choice([4, 8])]
        data[place : place + len(number)] = number
    file.write_bytes(data)


ODD = [2**31 - 1, 2**40, 2**70, 0, -1, 1, 2, 3, 63, 1.5, 1e308, float("inf"), float("nan"), "", "64", "llama", "gemma2",
       None, True, False, [], [1], {}, {"a": 1}, [[[[]]]], "x" * 10000, "a\nb"]  # fmt: skip


def odd_json(file: Path, rng: random.Random) -> None:
    """One value of a JSON file, or of the JSON header of a safetensors file, becomes another, goes, or comes."""
    data, tail = file.read_bytes(), b""
    if file.suffix == ".safetensors":
        size = int.from_bytes(data[:8], "little")
        data, tail = data[8 : 8 + size], data[8 + size :]
    content = json.loads(data)
    where = content
    while inner := [v for v in where.values() if isinstance(v, dict) and v]:
        if rng.random() < 0.3:
            break
        where = rng.choice(inner)
    key = rng.choice(sorted(where))
    if isinstance(where[key], list) and where[key] and rng.random() < 0.7:
        where[key][rng.randrange(len(where[key]))] = rng.choice(ODD)
    elif rng.random() < 0.2:
        del where[key]
    else:
        where[key if rng.random() < 0.9 else "x" + key] = rng.choice(ODD)
    data = json.dumps(content).encode()
    file.write_bytes(data if file.suffix == ".json" else len(data).to_bytes(8, "little") + data + tail)


def odd_tensor(file: Path, rng: random.Random) -> None:
    """One tensor of another dtype or shape, missing, extra, or (in a pickle) no ordinary tensor at all."""
    safe = file.suffix == ".safetensors"
    tensors = load_file(file) if safe else torch.load(file, weights_only=True)
    name = rng.choice(sorted(tensors))
    t = tensors[name].float()
    odd = [
        t.double(), t.to(torch.int32), t.to(torch.int8), t.to(torch.uint8), t.to(torch.bool), t.to(torch.float8_e4m3fn),
        t[:0], t[:-1], t[None], t[0], t.sum(), t.T if t.ndim > 1 else t, torch.cat([t, t]), t[..., :-1], t * float("nan"),
    ]  # fmt: skip
    if not safe:
        odd += [
            t.as_strided((2**20, 2**20), (0, 0)), t.as_strided(t.shape, [0] * t.ndim), t.to_sparse(), t.to("meta"), 5, "x",
            None, [t], {name: t}, torch.nn.Parameter(t), torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
        ]  # fmt: skip
    value = rng.choice(odd)
    value = value.contiguous() if safe else value
    key = rng.choice([name, name, name, name.replace("weight", "bias"), f"layers.7.{name}"] + ([] if safe else [7, None]))
    tensors[key] = value
    if rng.random() < 0.2:
        del tensors[name]
    (save_file if safe else torch.save)(tensors, file)


class _Code:
    """Unpickling it would end the process with a telltale status."""

    def __reduce__(self):
        return os._exit, (99,)


def other_content(file: Path, rng: random.Random) -> None:
    what = rng.choice(["text", "zeros", "noise", "zip", "bomb", "code", "zipped code", "png", "gguf head", "json", "deep"])
    if what in ("zip", "bomb"):
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", b"\0" * (3 * 10**8 if what == "bomb" else 100))
            archive.writestr("archive/version", "3\n")
    elif what == "zipped code":
        torch.save({"norm.weight": _Code()}, file)
    else:
        file.write_bytes({
            "text": b"not a tensor file at all, but long enough to hold the length of a header", "zeros": bytes(5000),
            "noise": rng.randbytes(5000), "code": pickle.dumps(_Code()), "png": b"\x89PNG\r\n\x1a\n" + bytes(100),
            "gguf head": b"GGUF" + struct.pack("<IQQ", 3, 2**62, 2**62) + bytes(200), "json": b'{"format": "llama-flat-1"}',
            "deep": b"[" * 200000,
        }[what])  # fmt: skip


def remove(file: Path, rng: random.Random) -> None:
    file.unlink()


def exchange(file: Path, rng: random.Random) -> None:
    other = rng.choice(sorted(f for f in file.parent.iterdir() if f.name != "tokenizer.model"))
    data = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(data)


def duplicate(file: Path, rng: random.Random) -> None:
    """The same content once more, under a name that a reader looks for."""
    names = ["model-2.safetensors", "consolidated.01.pth", "model.pth", "b.gguf", "params.json", "pytorch_model.bin"]
    shutil.copyfile(file, file.with_name(rng.choice([name for name in names if name != file.name])))


DAMAGES = {
    ".json": [odd_json] * 6 + [truncate, flip_bits, other_content, remove, exchange],
    ".safetensors": [odd_json, odd_json, odd_tensor, odd_tensor, truncate, flip_bits, flip_bits, huge_number, other_content,
                     remove, exchange],
    ".gguf": [truncate] + [flip_bits] * 4 + [huge_number] * 4 + [other_content],
}  # fmt: skip
DAMAGES[".pth"] = DAMAGES[".bin"] = [odd_tensor] * 3 + [truncate, flip_bits, flip_bits, flip_bits, huge_number, huge_number,
                                                         other_content, remove, exchange]  # fmt: skip


def damaged(paths: dict[str, Path], folder: Path, seed: int, number: int) -> tuple[str, Path]:
    """Variant `number`, made in `folder`: what it is, and the path to give."""
    rng = random.Random(f"{seed} {number}")
    name = sorted(paths)[number % len(paths)]
    source = paths[name] if paths[name].is_dir() else paths[name].parent
    copy = folder / source.name  # the folder's name says which model a bare model.pth is
    shutil.copytree(source, copy)
    file = rng.choice(sorted(f for f in copy.iterdir() if f.name != "tokenizer.model"))
    damage = rng.choice([*DAMAGES[file.suffix], duplicate])
    try:
        with warnings.catch_warnings(action="ignore"):
            damage(file, rng)
    except (ValueError, RuntimeError, KeyError):  # a file that this damage cannot be done to
        truncate(file, rng)
    return f"{name}: {damage.__name__} {file.name}", copy if paths[name].is_dir() else copy / paths[name].name


# --- loading ---


def load(path: Path) -> str | None:
    """None if the checkpoint loads, the message if it is refused as it should be. AssertionError for anything amiss."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            checkpoint = open_checkpoint(path)
            model, _ = quantize.load_model(checkpoint, CPU, torch.float32, None)
            if checkpoint.tokenizer_files:
                checkpoint.tokenizer_files()
            assert not [n for n, t in model.state_dict().items() if t.is_meta]
            message = None
        except ValueError as e:
            message = str(e)
    assert not caught, f"warned: {caught[0].message}"
    if message is not None:
        assert len(message.splitlines()) == 1 and 20 < len(message) < 1500, f"not one line: {message!r}"
    return message


def peak_bytes() -> int:
    """The most address space that this process ever had."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmPeak"))


def child(paths: dict[str, Path], seed: int, numbers: range, out, keep: Path | None) -> None:
    """Load variants, and write a line before and one after each."""
    for path in paths.values():
        # undamaged ones load, and what torch loads lazily is there
        if (message := load(path)) is not None:
            raise RuntimeError(message)
    room = peak_bytes() + 10 * BYTES
    resource.setrlimit(resource.RLIMIT_AS, (room, room))  # an allocation beyond it fails instead of harming the machine
    for number in numbers:
        with tempfile.TemporaryDirectory() as folder:
            what, path = damaged(paths, keep or Path(folder), seed, number)
            print(f"start\t{number}\t{what}", file=out, flush=True)
            before = peak_bytes()
            signal.alarm(SECONDS)  # kills: a loop in a library would never see a Python handler
            try:
                message = load(path)
                size = sum(f.stat().st_size for f in path.parent.rglob("*") if f.is_file())
                # mapped files count twice: the safetensors library maps a file for itself and for torch
                grown = peak_bytes() - before - 2 * size
                assert grown <= BYTES, f"took {grown / 1e6:.0f} MB beyond its files"
                result = f"refused\t{message}" if message else "loaded\t"
            except Exception as e:
                result = f"FAILED\t{type(e).__name__}: {' '.join(str(e).split())[:400]}"
            signal.alarm(0)
            print(f"end\t{number}\t{what}\t{result}", file=out, flush=True)


def run(paths: dict[str, Path], seed: int, first: int, count: int, keep: Path | None = None) -> list[tuple[int, str, str]]:
    """(number, what it is, result) of each variant. Children take over where one died."""
    results, number = [], first
    while number < first + count:
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            status = 1
            try:
                with os.fdopen(write, "w") as out:
                    child(paths, seed, range(number, first + count), out, keep)
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(write)
        started = None
        with os.fdopen(read) as lines:
            for line in lines:
                kind, n, what, *result = line.rstrip("\n").split("\t", 4)
                started = (int(n), what) if kind == "start" else None
                if kind == "end":
                    results.append((int(n), what, "\t".join(result)))
        _, status = os.waitpid(pid, 0)
        if status and started is None:
            raise RuntimeError(f"the child ended with status {status} outside of a variant")
        if started is not None:
            results.append((*started, f"FAILED\tthe process ended with status {os.waitstatus_to_exitcode(status)}"))
        number = results[-1][0] + 1
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description="Load damaged checkpoints of every format.")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="make the (one) variant there, and leave it")
    parser.add_argument("--verbose", action="store_true", help="print every variant")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        results = run(write_all(Path(folder)), args.seed, args.first, args.count, args.keep)
    failed = 0
    for number, what, result in results:
        failed += result.startswith("FAILED")
        if args.verbose or result.startswith("FAILED"):
            print(f"{number}\t{what}\t{result}")
    counts = collections.Counter(result.split("\t")[0] for _, _, result in results)
    print(f"{len(results)} variants: " + ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())))
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
