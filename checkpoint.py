"""Read and write checkpoints: which files, which names, which shapes. No command line, no weight scheme.

Our format is a folder with `config.json` (the fields of `ModelArgs` and `"format": "llama-flat-1"`), `model*.safetensors`
under Meta's weight names with q, k and v stacked as `wqkv`, and the tokenizer's files.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from model import ModelArgs, Transformer

FORMAT = "llama-flat-1"
SHARD_BYTES = 4 * 10**9
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint. `read()` returns it on the CPU, possibly as a view of the mapped file; all else comes
    from the header, so a dry run can share everything but that call."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as e:
        raise ValueError(f"{path}: not a readable JSON file ({e})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds no JSON object")
    return value


def find_folder(path: str | Path) -> Path:
    """The folder of a checkpoint named by a folder or by a file in it."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"--checkpoint_path {path}: not there (bash scripts/quickstart.sh fetches the default model)")
    return path if path.is_dir() else path.parent


def read_args(path: str | Path) -> ModelArgs:
    """The configuration of a checkpoint. ValueError names what is missing or not built yet."""
    folder = find_folder(path)
    if not (folder / "config.json").is_file():
        raise ValueError(f"--checkpoint_path {folder}: no config.json there, so it is no checkpoint that can be read")
    config = _read_json(folder / "config.json")
    if config.get("format") != FORMAT:
        kind = "a Hugging Face folder" if "model_type" in config else f"of format {config.get('format')!r}"
        raise ValueError(f"--checkpoint_path {folder}: {kind} is not read yet, only {FORMAT!r} of scripts/convert_gguf.py")
    return ModelArgs.from_dict({k: v for k, v in config.items() if k != "format"})


def read_entries(path: str | Path) -> Iterator[Entry]:
    """Every tensor of a checkpoint, file by file; the files are mapped, not read."""
    folder = find_folder(path)
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ValueError(f"--checkpoint_path {folder}: no model*.safetensors there")
    for file in files:
        try:
            mapped = safe_open(file, framework="pt", device="cpu")
            names = list(mapped.keys())
        except (SafetensorError, OSError, RuntimeError) as e:
            raise ValueError(f"{file}: damaged or not a safetensors file ({_first_line(e)})") from None
        for name in names:
            header = mapped.get_slice(name)
            if header.get_dtype() not in DTYPES:
                raise ValueError(f"{file}: {name} has dtype {header.get_dtype()}, expected one of {', '.join(DTYPES)}")
            yield Entry(
                name,
                tuple(header.get_shape()),
                DTYPES[header.get_dtype()],
                lambda mapped=mapped, name=name: mapped.get_tensor(name),
            )


def _first_line(e: Exception) -> str:
    return str(e).splitlines()[0] if str(e) else type(e).__name__


def load_model(path: str | Path, device: torch.device, dtype: torch.dtype) -> Transformer:
    """Build the model on the meta device and put the checkpoint's tensors in, one at a time: cast to dtype on the host,
    then moved. A tensor that needs neither stays a view of the mapped file. ValueError for missing, extra or misshapen ones.
    """
    model, expected = empty_model(read_args(path))
    weights = {}
    for entry in read_entries(path):
        if entry.name not in expected:
            raise ValueError(f"--checkpoint_path {path}: tensor {entry.name} does not belong to this model")
        if entry.name in weights:
            raise ValueError(f"--checkpoint_path {path}: tensor {entry.name} is there twice")
        if entry.shape != expected[entry.name]:
            raise ValueError(
                f"--checkpoint_path {path}: tensor {entry.name} has shape {list(entry.shape)}, "
                f"config.json asks for {list(expected[entry.name])}"
            )
        weights[entry.name] = _aligned(entry.read().to(dtype)).to(device)
    missing = [name for name in expected if name not in weights]
    if missing:
        raise ValueError(f"--checkpoint_path {path}: {len(missing)} tensors are missing, the first is {missing[0]}")
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(False)


def empty_model(args: ModelArgs) -> tuple[Transformer, dict[str, tuple[int, ...]]]:
    """A model on the meta device, and the shapes that its weights must have."""
    with torch.device("meta"):
        model = Transformer(args).eval()
    return model, {name: tuple(t.shape) for name, t in model.state_dict().items()}


def _aligned(t: Tensor) -> Tensor:
    """A mapped tensor may start anywhere; vector kernels round by where their rows start, so results would depend on it."""
    return t if t.data_ptr() % 64 == 0 else t.clone()


def random_model(args: ModelArgs, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Transformer:
    """A model with random weights, for costing one without its download: normal with deviation 0.02, norms 1."""
    model, expected = empty_model(args)
    torch.manual_seed(seed)
    weights = {}
    for name, shape in expected.items():
        weights[name] = torch.empty(shape, dtype=dtype, device=device)
        weights[name].fill_(1) if name.endswith("norm.weight") else weights[name].normal_(0, 0.02)
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(False)


def write_checkpoint(folder: str | Path, args: ModelArgs, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write our format. Tensors are taken one at a time and kept until a shard of 4 GB is full."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"format": FORMAT} | asdict(args)
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
