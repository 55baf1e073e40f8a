"""Read and write checkpoints: which files, which names, which shapes. No command line, no weight scheme.

Whatever the format, a checkpoint becomes `Entry` objects under our names (Meta's, with q, k and v stacked as `wqkv`), whose
rows come in blocks: views of the mapped file where the file holds them as they are needed, small copies elsewhere. So the
host never holds more than the model and one block. Headers are checked against the configuration when a checkpoint is
opened: names, shapes and dtypes are known to be right before any memory is taken for weights.

Our own format is a folder with `config.json` (the fields of `ModelArgs`, `"format": "llama-flat-1"`, and `"quantization"`
where the weights are), `model*.safetensors`, and the tokenizer's files.
"""

import functools
import itertools
import json
import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

import gguf_file
from entries import Checkpoint, Entry, Part, fill, numbered, stacked_shape
from model import ModelArgs, Transformer, transformer_configs

FORMAT = "llama-flat-1"
SHARD_BYTES = 4 * 10**9
MOST_LAYERS = 1000  # of a configuration without files; a model of as many as a damaged one may say is never built
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES = FLOATS | {"I8": torch.int8, "U8": torch.uint8}  # the integers: quantized weights of our own format


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Find out what a path holds; headers alone are read. ValueError of one line for what is damaged, foreign or unknown."""
    path = Path(path)
    try:
        if not path.exists():
            raise ValueError(f"--checkpoint_path {path}: not there (bash scripts/quickstart.sh fetches the default model)")
        for reader in FORMATS.values():
            if (checkpoint := reader(path)) is not None:
                return checkpoint
    except (OSError, ValueError) as e:
        text = " ".join(str(e).splitlines())[:1000]  # names in a file may be anything
        raise ValueError(text if isinstance(e, ValueError) else f"--checkpoint_path {path}: {text}") from None
    raise ValueError(f"--checkpoint_path {path}: holds no checkpoint that can be read, which are: {'; '.join(FORMATS)}")


# --- into a model ---


def empty_model(args: ModelArgs) -> tuple[Transformer, dict[str, tuple[int, ...]]]:
    """A model on the meta device, and the shapes that its weights must have."""
    with torch.device("meta"):
        model = Transformer(args).eval()
    return model, {name: tuple(t.shape) for name, t in model.state_dict().items()}


def load_model(path: str | Path, device: torch.device, dtype: torch.dtype) -> Transformer:
    """Open a checkpoint and load it as it is; see `load_weights`."""
    return _loaded(open_checkpoint(path), device, dtype)


def _loaded(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Transformer:
    model, _ = empty_model(checkpoint.args)
    load_weights(model, checkpoint, device, dtype)
    return model


def load_weights(model: Transformer, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
    """Put a checkpoint's tensors into a model on the meta device, in blocks of rows, cast on the host, then moved. What
    needs neither stays a view of the mapped file. A parameter becomes `dtype`; a buffer keeps its own, which the file must
    have. A module with `shape` and `take_rows(start, rows)` in the place of a weight is put on the device, still empty, and
    handed the rows as they are stored. At the end every module with `prepare(dtype, device)` is called. ValueError for
    tensors that are missing, misshapen, or do not belong to the model, before any is read."""
    expected, parameters = model.state_dict(), dict(model.named_parameters())
    takers = {f"{path}.weight": module for path, module in model.named_modules() if hasattr(module, "take_rows")}
    where, weights, entries = f"--checkpoint_path {checkpoint.path}", {}, {}
    for entry in checkpoint.entries():
        name = entry.name
        if name in entries:
            raise ValueError(f"{where}: tensor {name} is there twice")
        if name not in expected and name not in takers:
            raise ValueError(f"{where}: tensor {name!r} does not belong to this model")
        _check_shape(where, name, entry.shape, tuple(expected[name].shape if name in expected else takers[name].shape))
        allowed = (expected[name].dtype,) if name in expected and name not in parameters else FLOATS.values()
        if entry.dtype not in allowed:
            raise ValueError(f"{where}: tensor {name} has dtype {entry.dtype}, expected {' or '.join(map(str, allowed))}")
        entries[name] = entry
    if missing := [n for n in expected if f"{n.rpartition('.')[0]}.weight" not in entries and n not in entries]:
        raise ValueError(f"{where}: {len(missing)} tensors are missing, the first is {missing[0]}")
    dtypes = {n: dtype if n in parameters else t.dtype for n, t in expected.items()}
    weights = {n: _mapped(e, device, dtypes[n]) for n, e in entries.items() if n in expected}
    unread = {n for n, t in weights.items() if t is None}
    # First all memory, then the rows: what is allocated among the temporaries of reading leaves holes, up to 60 % more. And
    # the largest first: smaller ones fit into what those leave of an allocator's segments.
    for name in sorted(entries, key=lambda n: -math.prod(entries[n].shape)):
        if name in takers:
            takers[name].to_empty(device=device)
        elif name in unread:
            weights[name] = torch.empty(entries[name].shape, dtype=dtypes[name], device=device)
    for name, entry in tqdm(entries.items(), "loading", leave=False, delay=2, disable=None):  # None: no bar in a log
        for start, rows in numbered(entry) if name in takers else ():
            takers[name].take_rows(start, rows.to(device))
            del rows  # before the next ones are made
        if name in unread:
            fill(weights[name], entry)
    model.load_state_dict(weights, strict=False, assign=True)
    for module in model.modules():
        if hasattr(module, "prepare"):
            module.prepare(dtype, device)
    model.requires_grad_(False)
    assert not any(t.device.type == "meta" for t in (*model.parameters(), *model.buffers())), "not all was loaded"


def _check_shape(where: str, name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if shape != wanted:
        raise ValueError(f"{where}: tensor {name} has shape {list(shape)}, its configuration asks for {list(wanted)}")


def _mapped(entry: Entry, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """The file's own memory, where it can serve as it is. A mapped tensor may start anywhere; vector kernels round by where
    their rows start, so results would depend on it."""
    if not entry.mapped or entry.dtype != dtype or device.type != "cpu":
        return None
    return t if (t := entry.read()).data_ptr() % 64 == 0 else None


def configuration(text: str) -> ModelArgs:
    """A known configuration's name; or a config.json (ours or Hugging Face's), a params.json (Meta's), a folder with one."""
    path = Path(text)
    names = (path, path / "config.json", path / "params.json")
    file = next((f for f in names if f.suffix == ".json" and f.is_file()), None)
    if file is None:
        return _args("--random_weights", ModelArgs.from_name, text)
    config, where = _read_json(file), f"--random_weights {file}"
    if "format" in config:
        args = _args(where, ModelArgs.from_dict, {k: v for k, v in config.items() if k not in ("format", "quantization")})
    else:
        build = ModelArgs.from_meta if "n_layers" in config else ModelArgs.from_hf
        args = _args(where, build, config, file.resolve().parent.name)
    if args.n_layer > MOST_LAYERS:
        raise ValueError(f"{where}: {args.n_layer} layers are no Llama's")
    return args


def random_checkpoint(args: ModelArgs, device: torch.device, seed: int = 0) -> Checkpoint:
    """Weights made up as they are read, on `device`, in bfloat16 like most published ones: normal with deviation 0.02,
    norms 1. For costing a model without its download."""

    def rows(shape: tuple[int, ...], norm: bool, start: int, stop: int) -> Tensor:
        t = torch.empty(stop - start, *shape[1:], dtype=torch.bfloat16, device=device)
        return t.fill_(1) if norm else t.normal_(0, 0.02)

    def entries(check: bool = True) -> Iterator[Entry]:
        torch.manual_seed(seed)
        for name, shape in empty_model(args)[1].items():
            make = functools.partial(rows, shape, name.endswith("norm.weight"))
            yield Entry(name, [Part(shape, torch.bfloat16, make, view=False, made=True)])

    return Checkpoint(Path(args.name), Path(args.name), args, None, entries)


def random_model(args: ModelArgs, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Transformer:
    """A model with the weights of `random_checkpoint`."""
    return _loaded(random_checkpoint(args, device, seed), device, dtype)


# --- from files to entries ---

# Meta's name -> Hugging Face's; GGUF's stand in gguf_file.py. Names that are not listed are the same.
HF_NAMES = {
    "tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head", "layers": "model.layers",
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj", "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
OUR_NAMES = {}  # and the files hold q, k and v as one tensor already


def _wanted(args: ModelArgs, names: dict[str, str]) -> Iterator[tuple[str, list[tuple[str, tuple[int, ...]]]]]:
    """Our tensors in order: (name, [(name in the file, shape) of each that is stacked to it])."""
    q, kv, dim, hidden = args.n_head * args.head_dim, args.n_local_heads * args.head_dim, args.dim, args.intermediate_size
    layer = {
        "attention.wqkv": {"attention.wqkv": (q + 2 * kv, dim)} if names is OUR_NAMES else
        {"attention.wq": (q, dim), "attention.wk": (kv, dim), "attention.wv": (kv, dim)},
        "attention.wo": {"attention.wo": (dim, q)},
        "attention_norm": {"attention_norm": (dim,)},
        "ffn_norm": {"ffn_norm": (dim,)},
    }  # fmt: skip
    layer |= {f"feed_forward.w{i}": {f"feed_forward.w{i}": (dim, hidden) if i == 2 else (hidden, dim)} for i in (1, 2, 3)}
    ends = {"tok_embeddings": (args.vocab_size, dim), "norm": (dim,)}
    if not args.tie_word_embeddings:
        ends["output"] = (args.vocab_size, dim)
    for name, shape in ends.items():
        yield f"{name}.weight", [(f"{names.get(name, name)}.weight", shape)]
    for i in range(args.n_layer):  # lazily: a damaged configuration may say a billion
        prefix = f"{names.get('layers', 'layers')}.{i}."
        for name, parts in layer.items():
            yield f"layers.{i}.{name}.weight", [(f"{prefix}{names.get(n, n)}.weight", shape) for n, shape in parts.items()]


def _entries(where: str, args: ModelArgs, parts: dict[str, list[Part]], names: dict[str, str]) -> Callable:
    """Match a file's tensors (each one part or several, stacked) with what the configuration asks for, and return a
    checkpoint's `entries`. ValueError names the first that is missing, misshapen or not known."""
    head = f"{names.get('output', 'output')}.weight"
    spare = parts.get(head) if args.tie_word_embeddings else None
    entries, used = [], {head} if spare else set()
    for ours, wanted in _wanted(args, names):
        for name, shape in wanted:
            if name not in parts:
                raise ValueError(f"{where}: tensor {name} is missing")
            _check_shape(where, name, stacked_shape(parts[name]), shape)
            used.add(name)
        entries.append(Entry(ours, [part for name, _ in wanted for part in parts[name]]))
    if extra := parts.keys() - used:
        raise ValueError(f"{where}: tensor {min(extra)} does not belong to this model")

    def generate(check: bool = True) -> Iterator[Entry]:
        if check and spare and not _same(Entry(head, spare), entries[0]):
            raise ValueError(f"{where}: the configuration ties the head to the embedding, but {head} differs from it")
        yield from entries

    return generate


def _same(a: Entry, b: Entry) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype) and all(map(torch.equal, a.blocks(), b.blocks()))


def _permuted(part: Part, head_dim: int) -> Part:
    """Rows of q or k from Hugging Face's order to Meta's: within a head, rows i and i + D/2 become 2i and 2i + 1. With
    D = 4: rows 0 1 2 3 are taken as 0 2 1 3."""

    def rows(start: int, stop: int) -> Tensor:
        return part.rows(start, stop).unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)

    return Part(part.shape, part.dtype, rows, view=False, unit=head_dim)


# --- files ---


def _one_line(e: Exception) -> str:
    return str(e).splitlines()[0][:300] if str(e) else type(e).__name__


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ValueError(f"{path}: not a readable JSON file ({_one_line(e)})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds no JSON object")
    return value


def _read_safetensors(file: Path) -> Iterator[tuple[str, Part]]:
    try:
        mapped = safe_open(file, framework="pt", device="cpu")
        headers = {name: mapped.get_slice(name) for name in mapped.keys()}  # noqa: SIM118 - it is no dict
    except (SafetensorError, OSError, RuntimeError, UnicodeError) as e:
        raise ValueError(f"{file}: damaged or not a safetensors file ({_one_line(e)}); download it again") from None
    for name, header in headers.items():
        shape, dtype = tuple(header.get_shape()), header.get_dtype()
        if dtype not in DTYPES or not shape:
            raise ValueError(f"{file}: {name} is {dtype} of shape {list(shape)}, not a matrix of {', '.join(DTYPES)}")
        yield name, Part(shape, DTYPES[dtype], lambda a, b, name=name: mapped.get_tensor(name)[a:b])


def _read_pickle(file: Path) -> Iterator[tuple[str, Part]]:
    """A file of torch.save. Only tensors are taken out of it, and no code in it ever runs."""
    try:
        size = file.stat().st_size
        with zipfile.ZipFile(file) as archive, warnings.catch_warnings(action="ignore"):
            if any(m.compress_type != zipfile.ZIP_STORED or m.file_size > size for m in archive.infolist()):
                raise ValueError("it is compressed")  # torch.save never does that; a small file could become a huge one
            tensors = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        if not isinstance(tensors, dict):
            raise ValueError(f"holds a {type(tensors).__name__}, no dict of tensors")
    except Exception as e:  # unpickling what is damaged can raise anything
        why = "what it holds is not run" if isinstance(e, pickle.UnpicklingError) else _one_line(e)
        raise ValueError(f"{file}: damaged, not a file of tensors alone, or older than torch 1.6 ({why})") from None
    for name, t in tensors.items():
        if not isinstance(name, str) or type(t) not in (Tensor, nn.Parameter) or t.layout != torch.strided:
            raise ValueError(f"{file}: {str(name)[:100]!r} is no tensor")
        # strides of 0 and overlapping views make much out of little
        if t.dtype not in FLOATS.values() or not t.ndim or t.device.type != "cpu" or t.nbytes > t.untyped_storage().nbytes():
            raise ValueError(f"{file}: {name} is a {t.dtype} tensor of shape {list(t.shape)} that is not supported")
        yield name, Part(tuple(t.shape), t.dtype, lambda a, b, t=t: t[a:b].detach(), view=t.is_contiguous())


def _merged(files: Iterable[Path]) -> dict[str, list[Part]]:
    """The tensors of several files by name."""
    parts = {}
    for file in files:
        for name, part in (_read_safetensors if file.suffix == ".safetensors" else _read_pickle)(file):
            if name in parts:
                raise ValueError(f"{file}: tensor {name} is there twice")
            parts[name] = [part]
    return parts


def _folder(path: Path, *suffixes: str) -> Path | None:
    """The folder that a path is, or that a file with one of the suffixes stands in."""
    return path if path.is_dir() else path.parent if path.suffix in suffixes else None


def _args(where: str, build: Callable[..., ModelArgs], *arguments) -> ModelArgs:
    try:
        return build(*arguments)
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as e:
        raise ValueError(f"{where}: {_one_line(e)}") from None


# --- formats: each opens a path, or returns None where it is another's ---


def _open_ours(path: Path) -> Checkpoint | None:
    folder = _folder(path, ".json", ".safetensors")
    if folder is None or not (folder / "config.json").is_file():
        return None
    config = _read_json(folder / "config.json")
    if "format" not in config:
        return None
    where = f"--checkpoint_path {folder}"
    if config.pop("format") != FORMAT:
        raise ValueError(f"{where}: config.json names a format that is not read, only {FORMAT!r} and others' folders")
    quantization = config.pop("quantization", None)
    if not isinstance(quantization, str | None):
        raise ValueError(f"{where}: quantization in config.json is no name")
    args = _args(where, ModelArgs.from_dict, config)
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ValueError(f"{where}: no model*.safetensors there")
    parts = _merged(files)
    if quantization is None:
        return Checkpoint(path, folder, args, None, _entries(where, args, parts, OUR_NAMES))
    # Names are the scheme's affair; but the configuration must be of a size that the files can hold.
    layers = {name.split(".")[1] for name in parts if name.startswith("layers.")}
    stored = sum(math.prod(p.shape) * p.dtype.itemsize for (p,) in parts.values())
    weights = (math.prod(shape) for _, wanted in _wanted(args, OUR_NAMES) for _, shape in wanted)
    if len(layers) != args.n_layer or sum(weights) > 8 * stored:
        raise ValueError(f"{where}: config.json asks for {args.n_layer} layers, there are {len(layers)}; {stored} bytes")
    return Checkpoint(path, folder, args, quantization, lambda check=True: map(Entry, parts, parts.values()))


def _open_hf(path: Path) -> Checkpoint | None:
    folder = _folder(path, ".json", ".safetensors", ".bin")
    if folder is None or not (folder / "config.json").is_file():
        return None
    config = _read_json(folder / "config.json")
    files = _hf_files(folder)
    if "model_type" not in config or not files:
        return None
    where = f"--checkpoint_path {folder} (Hugging Face)"
    args = _args(where, ModelArgs.from_hf, config, folder.resolve().name)
    # tables that older versions of transformers stored, computed here
    parts = {name: part for name, part in _merged(files).items() if not name.endswith(".rotary_emb.inv_freq")}
    for name in parts:
        if name.endswith(("q_proj.weight", "k_proj.weight")) and parts[name][0].shape[0] % args.head_dim == 0:
            parts[name] = [_permuted(parts[name][0], args.head_dim)]
    return Checkpoint(path, folder, args, None, _entries(where, args, parts, HF_NAMES))


def _hf_files(folder: Path) -> list[Path]:
    """One file; or the shards that an index lists; or shards without an index. ValueError names a missing shard."""
    for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        single, index = folder / f"{stem}{suffix}", folder / f"{stem}{suffix}.index.json"
        if single.is_file():
            return [single]
        if index.is_file():
            shards = _read_json(index).get("weight_map")
            if not isinstance(shards, dict) or not all(isinstance(s, str) and s == Path(s).name for s in shards.values()):
                raise ValueError(f"{index}: its weight_map does not name a file of this folder for each tensor")
            names = sorted(set(shards.values()))
        else:
            names = sorted(file.name for file in folder.glob(f"{stem}-*{suffix}"))
            if names and (numbers := re.fullmatch(r"(.*-)(\d+)-of-(\d{1,5})\.\w+", names[0])):
                base, first, count = numbers.groups()
                names = [f"{base}{i:0{len(first)}d}-of-{count}{suffix}" for i in range(1, int(count) + 1)]
        for name in names:
            if not (folder / name).is_file():
                raise ValueError(f"--checkpoint_path {folder}: shard {name} is missing; download it")
        if names:
            return [folder / name for name in names]
    return []


def _open_meta(path: Path) -> Checkpoint | None:
    root = _folder(path, ".json", ".pth")
    if root is None or (path.suffix == ".pth" and not path.is_dir() and not path.name.startswith("consolidated.")):
        return None
    folder = next((f for f in (root, root / "original") if (f / "params.json").is_file()), None)
    if folder is None:
        return None
    where, files = f"--checkpoint_path {folder}", sorted(folder.glob("consolidated.*.pth"))
    for i in range(max(len(files), 1)):
        if not (folder / f"consolidated.{i:02d}.pth").is_file():
            raise ValueError(f"{where}: shard consolidated.{i:02d}.pth is missing; download it")
    home, params = folder.parent if folder.name == "original" else folder, _read_json(folder / "params.json")
    args = _args(where, ModelArgs.from_meta, params, home.resolve().name)
    shards = [{name: part for name, (part,) in _merged([file]).items()} for file in files]
    for file, shard in zip(files, shards, strict=True):
        if {n: p.shape for n, p in shard.items()} != {n: p.shape for n, p in shards[0].items()}:
            raise ValueError(f"{file}: its tensors differ from those of {files[0].name} in names or shapes")
    if params.get("vocab_size", -1) == -1 and "tok_embeddings.weight" in shards[0]:
        shape = shards[0]["tok_embeddings.weight"].shape
        args = replace(args, vocab_size=shape[0] * (len(files) if shape[-1] == args.dim else 1))
    args = replace(args, tie_word_embeddings="output.weight" not in shards[0])
    # up to the first that is not there: a damaged configuration may ask for a billion
    there = itertools.takewhile(lambda w: all(name in shards[0] for name, _ in w[1]), _wanted(args, {}))
    shapes = {name: shape for _, wanted in there for name, shape in wanted}
    parts = {n: _unsharded([s[n] for s in shards], shapes.get(n)) for n in shards[0] if n != "rope.freqs"}
    tokens = home if any((home / f).is_file() for f in ("tokenizer.model", "tokenizer.json")) else folder
    return Checkpoint(path, tokens, args, None, _entries(where, args, parts, {}))


def _unsharded(shards: list[Part], shape: tuple[int, ...] | None) -> list[Part]:
    """Meta cuts a matrix along its rows or along its columns, and repeats the norms: the shape tells which."""
    first, n = shards[0], len(shards)
    if first.shape == shape and len(shape) == 1:
        return [first]
    if n > 1 and len(first.shape) == 2 and (first.shape[0], first.shape[1] * n) == shape:
        return [Part(shape, first.dtype, lambda a, b: torch.cat([s.rows(a, b) for s in shards], 1), view=False)]
    return shards  # rows, to be stacked


def _open_bare(path: Path) -> Checkpoint | None:
    """The ancestor's file has our names and no configuration: Hugging Face's beside it, or the folder's name, says it."""
    file = path / "model.pth" if path.is_dir() else path
    if file.suffix != ".pth" or not file.is_file():
        return None
    folder, where = file.parent, f"--checkpoint_path {file}"
    name = folder.resolve().name.split("--")[-1]
    config = _read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if "model_type" in config:
        args = _args(where, ModelArgs.from_hf, config, name)
    else:
        short = re.sub(r"^meta-|(-hf|-chat|-instruct)+$", "", name, flags=re.IGNORECASE).lower()
        known = next((k for k in transformer_configs if k.lower() == short), None)
        if known is None:
            raise ValueError(f"{where}: its folder {name!r} is no known model's; known: {', '.join(transformer_configs)}")
        args = ModelArgs.from_name(known)
    return Checkpoint(path, folder, args, None, _entries(where, args, _merged([file]), OUR_NAMES))


def _open_gguf(path: Path) -> Checkpoint | None:
    files = [f for f in sorted(path.iterdir()) if f.suffix.lower() == ".gguf"] if path.is_dir() else [path]
    if not files or files[0].suffix.lower() != ".gguf":
        return None
    if len(files) > 1:
        raise ValueError(f"--checkpoint_path {path}: holds {len(files)} GGUF files; name one, such as {files[0].name}")
    where, file = f"--checkpoint_path {files[0]}", gguf_file.read_gguf(files[0])
    args = gguf_file.model_args(file, files[0].stem)
    parts = {name: [part] for name, part in file.tensors.items() if name != gguf_file.ROPE_FACTORS}
    tokenizer = functools.partial(gguf_file.tokenizer_files, file.metadata, where)
    return Checkpoint(path, files[0].parent, args, None, _entries(where, args, parts, gguf_file.NAMES), tokenizer)


# Tried in order; what none takes is refused with this list.
FORMATS: dict[str, Callable[[Path], Checkpoint | None]] = {
    "this project's folder (config.json, model*.safetensors)": _open_ours,
    "a Hugging Face folder (config.json, model*.safetensors or pytorch_model*.bin)": _open_hf,
    "a Meta folder (params.json, consolidated.*.pth)": _open_meta,
    "model.pth in a folder named like a known model": _open_bare,
    "a .gguf file": _open_gguf,
}


# --- writing ---


def write_checkpoint(folder: str | Path, args: ModelArgs, tensors: Iterable[tuple[str, Tensor]], quantization=None) -> None:
    """Write our format. Tensors of any dtype are taken one at a time and kept until a shard of 4 GB is full.
    `quantization` names the scheme that the tensors are in, None for floats."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"format": FORMAT} | asdict(args) | ({"quantization": quantization} if quantization else {})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    shard, size, number = {}, 0, 1

    def flush(file: str) -> None:
        save_file(shard, folder / file)
        (folder / file).chmod((folder / "config.json").stat().st_mode)  # the library makes it private

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            flush(f"model-{number:05d}.safetensors")
            shard, size, number = {}, 0, number + 1
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
    flush("model.safetensors" if number == 1 else f"model-{number:05d}.safetensors")
