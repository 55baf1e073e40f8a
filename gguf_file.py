"""GGUF files of llamas: header, model arguments, tensors and the tokenizer inside. Writes nothing.

llama.cpp keeps the rows of q and k in the order that Meta's RoPE wants, neighbours forming pairs, and so does this
project: nothing is permuted. The header is parsed here and not by the gguf library, whose reader takes every length in the
file at its word: a damaged one hangs it, or fills the memory.
"""

import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from entries import Part
from model import ModelArgs, RopeScaling, rope_table
from tokenizer import LLAMA3_PATTERN

# --- the file ---

SCALARS = "BbHhIif?sAQqd"  # struct's letters by the file's type number; s: a string, A: an array
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTIZED = "Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS".split()
DEQUANTIZE_BYTES = 2**20  # of float32 at once: numpy's temporaries are several times as large


@dataclass(frozen=True)
class GGUFFile:
    """The metadata (arrays of numbers as numpy arrays) and the tensors, both under llama.cpp's names."""

    path: Path
    metadata: dict
    tensors: dict[str, Part]


class _Reader:
    """Takes values one after the other; nothing is trusted that the file is too short for."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 0

    def take(self, letter: str):
        (value,) = struct.unpack_from("<" + letter, self.data, self.at)
        self.at += struct.calcsize("<" + letter)
        return value

    def skip(self, size: int) -> int:
        """Where `size` bytes begin, which are passed over."""
        if size > len(self.data) - self.at:
            raise ValueError("it ends too early")
        self.at += size
        return self.at - size

    def string(self) -> str:
        size = self.take("Q")
        return self.data[self.skip(size) : self.at].decode("utf-8")

    def value(self):
        letter = SCALARS[self.take("I")]
        if letter == "s":
            return self.string()
        if letter != "A":
            return self.take(letter)
        letter, length = SCALARS[self.take("I")], self.take("Q")
        if letter == "s" and length <= (len(self.data) - self.at) // 8:
            return [self.string() for _ in range(length)]
        if letter in "sA":
            raise ValueError("an array is too long, or holds arrays")
        dtype = np.dtype("<" + letter)
        return np.frombuffer(self.data, dtype, length, self.skip(length * dtype.itemsize))


def read_gguf(path: Path) -> GGUFFile:
    """Map a file and read its header. ValueError of one line for what is damaged or not of a known type."""
    try:
        with open(path, "rb") as file:
            # copy on write: torch wants writable memory, and nobody writes
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return GGUFFile(path, *_parse(_Reader(data)))
    except (struct.error, LookupError, TypeError, ValueError, OverflowError, RecursionError) as e:
        why = "a type is unknown" if isinstance(e, LookupError) else _one_line(e)
        raise ValueError(f"{path}: damaged, or no GGUF file ({why}); download it again") from None


def _one_line(e: Exception) -> str:
    return " ".join(str(e).split()) or type(e).__name__


def _parse(r: _Reader) -> tuple[dict, dict[str, Part]]:
    if r.data[r.skip(4) : r.at] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    if (version := r.take("I")) not in (2, 3):
        raise ValueError(f"version {version}; 2 and 3 are read, little-endian")
    count, keys = r.take("Q"), r.take("Q")
    metadata = {}
    for _ in range(keys):
        name = r.string()
        metadata[name] = r.value()
    infos = {}
    for _ in range(count):
        name = r.string()
        if name in infos:
            raise ValueError(f"tensor {name} is there twice")
        dims = [r.take("Q") for _ in range(min(r.take("I"), 5))]
        infos[name] = dims, r.take("I"), r.take("Q")
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 8 or alignment % 8:
        raise ValueError(f"alignment {alignment!r}")
    start = -(-r.at // alignment) * alignment
    return metadata, {n: _stored(r.data, n, *info[:2], start, info[2]) for n, info in infos.items()}


def _stored(data: mmap.mmap, name: str, dims: list[int], number: int, start: int, offset: int) -> Part:
    gguf = _library()
    kind = gguf.GGMLQuantizationType(number)
    if kind.name not in (*PLAIN, *QUANTIZED):
        raise ValueError(f"tensor {name} is of type {kind.name}; read are {', '.join([*PLAIN, *QUANTIZED])}")
    # GGUF names the fastest dimension first: a matrix of R rows and C columns has the dimensions [C, R].
    shape, (block, block_bytes) = tuple(reversed(dims)), gguf.GGML_QUANT_SIZES[kind]
    if not (1 if kind.name in PLAIN else 2) <= len(shape) <= 4 or min(shape) < 1 or shape[-1] % block:
        raise ValueError(f"tensor {name} of type {kind.name} has the shape {list(shape)}")
    size = math.prod(shape) // block * block_bytes
    start += offset
    if start + size > len(data) or offset % 8:
        raise ValueError(f"tensor {name} lies beyond its end")
    if kind.name in PLAIN:
        dtype = PLAIN[kind.name]
        whole = torch.frombuffer(data, dtype=dtype, count=math.prod(shape), offset=start).view(shape)
        return Part(shape, dtype, lambda a, b: whole[a:b])
    packed = np.frombuffer(data, np.uint8, size, start).reshape(*shape[:-1], -1)
    return Part(shape, torch.float32, lambda a, b: _dequantized(packed[a:b], kind, shape[1:]), view=False)


def _library():
    """The gguf package, imported where a GGUF file is read: nothing else needs it."""
    try:
        import gguf
    except ImportError:
        raise ValueError("reading a GGUF file needs the package gguf: pip install gguf") from None
    return gguf


def _dequantized(packed: np.ndarray, kind: int, row: tuple[int, ...]) -> Tensor:
    gguf, result = _library(), torch.empty(len(packed), *row)
    step = max(DEQUANTIZE_BYTES // (4 * math.prod(row)), 1)
    with np.errstate(all="ignore"):  # a damaged scale may be inf: that is the file's affair, and no warning's
        for at in range(0, len(packed), step):
            result[at : at + step] = torch.from_numpy(gguf.dequantize(packed[at : at + step], kind))
    return result


# --- the model ---

# Meta's name -> llama.cpp's
NAMES = {
    "tok_embeddings": "token_embd", "norm": "output_norm", "output": "output", "layers": "blk",
    "attention.wq": "attn_q", "attention.wk": "attn_k", "attention.wv": "attn_v", "attention.wo": "attn_output",
    "feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up",
    "attention_norm": "attn_norm", "ffn_norm": "ffn_norm",
}  # fmt: skip
ROPE_FACTORS = "rope_freqs.weight"
# Every key of a llama that changes nothing, or is honoured below. Any other could change the function: refused.
KEYS = """context_length embedding_length block_count feed_forward_length vocab_size tensor_data_layout attention.head_count
    attention.head_count_kv attention.layer_norm_rms_epsilon attention.key_length attention.value_length
    rope.dimension_count rope.freq_base""".split()
OFF = {"rope.scaling.type": "none", "expert_count": 0, "expert_used_count": 0, "rope.scale_linear": 1.0}


def model_args(file: GGUFFile, name: str) -> ModelArgs:
    """The model's shape. ValueError for a foreign architecture and for whatever changes the function and is not built.
    A rate stored in float32 becomes the shortest decimal: 9.99999975e-06 is 1e-05."""

    def get(key: str, default=None):
        value = file.metadata.get(f"llama.{key}", default)
        if value is None or type(value) not in (int, float):
            raise ValueError(f"{file.path}: llama.{key} is {'missing' if value is None else 'no single number'}")
        return value

    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture != "llama":
        raise ValueError(f"{file.path}: its architecture is {architecture!r}: only llama is read")
    if "split.count" in file.metadata and list(np.ravel(file.metadata["split.count"])) != [1]:
        raise ValueError(f"{file.path}: is one part of several; join them first (llama-gguf-split --merge)")
    for key, value in file.metadata.items():
        short = key.removeprefix("llama.")
        if short != key and short not in KEYS and not (short in OFF and np.array_equal(value, OFF[short])):
            raise ValueError(f"{file.path}: has {key[:100]}, which is not supported")
    n_head, dim = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", dim // n_head if n_head else 0)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise ValueError(f"{file.path}: llama.{key} = {get(key)} differs from the head's {head_dim}: not supported")
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path}: tensor token_embd.weight is missing")
    args = dict(
        name=name, block_size=get("context_length"), vocab_size=file.tensors["token_embd.weight"].shape[0],
        n_layer=get("block_count"), n_head=n_head, n_local_heads=get("attention.head_count_kv", n_head), dim=dim,
        intermediate_size=get("feed_forward_length"), head_dim=head_dim, rope_base=shortest(get("rope.freq_base", 10000.0)),
        norm_eps=shortest(get("attention.layer_norm_rms_epsilon")), tie_word_embeddings="output.weight" not in file.tensors,
    )  # fmt: skip
    try:
        args = ModelArgs(**args)
    except ValueError as e:
        raise ValueError(f"{file.path}: {e}") from None
    return replace(args, rope_scaling=_rope_scaling(file, args))


def shortest(value: float) -> float:
    with np.errstate(all="ignore"):  # what is too large becomes inf, and is refused as such
        return float(str(np.float32(value)))


def _rope_scaling(file: GGUFFile, args: ModelArgs) -> RopeScaling | None:
    """llama.cpp stores what Llama 3.1's scaling divides each frequency by; the published scalings are recognised by it."""
    if ROPE_FACTORS not in file.tensors:
        return None
    stored = file.tensors[ROPE_FACTORS]
    if stored.shape == (args.head_dim // 2,):
        factors = stored.rows(0, stored.shape[0]).float()
        for known in (RopeScaling(factor=8.0), RopeScaling(factor=32.0)):
            if torch.allclose(factors, _angles(args) / _angles(replace(args, rope_scaling=known)), rtol=1e-3, atol=0):
                return known
    raise ValueError(f"{file.path}: {ROPE_FACTORS} is neither Llama 3.1's RoPE scaling (8) nor 3.2's (32): not supported")


def _angles(args: ModelArgs) -> Tensor:
    """How far each pair turns from one position to the next: at most 1 radian, so the table tells it."""
    cos, sin = rope_table(args, 2)[1].unbind(-1)
    return torch.atan2(sin, cos)


# --- the tokenizer ---

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
# tokenizer.ggml.pre -> the same splitting in Hugging Face's terms
PRE_TOKENIZERS = {
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]},
    "llama-bpe": {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False},
        BYTE_LEVEL | {"use_regex": False},
    ]},
    "gpt-2": BYTE_LEVEL,
}  # fmt: skip


def tokenizer_files(metadata: dict, where: str = "GGUF") -> dict[str, dict]:
    """Hugging Face's `tokenizer.json` and `tokenizer_config.json`, by name. ValueError for another kind of tokenizer, and
    for damaged metadata."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ValueError(f"{where}: its tokenizer is {kind!r}, {pre!r}: only 'gpt2' with {known} is read")
    try:
        return _tokenizer_files(metadata, pre)
    except (LookupError, TypeError, AttributeError, ValueError) as e:
        raise ValueError(f"{where}: its tokenizer's metadata are damaged ({_one_line(e)}); download it again") from None


def _tokenizer_files(metadata: dict, pre: str) -> dict[str, dict]:
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"].tolist()
    unknown, control, user_defined = 2, 3, 4  # llama.cpp's numbers of token types
    special = {unknown, control}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": id, "content": token} | flags | {"special": type in special}
        for id, (token, type) in enumerate(zip(tokens, types, strict=True))
        if type in special | {user_defined}
    ]
    bos_id, eos_id = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    bos, eos = (None if id is None else tokens[id] for id in (bos_id, eos_id))
    # llama.cpp's rule for files that do not say: Llama 3 starts with BOS, the others do not.
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")
    post_processor = None
    if add_bos:
        text, start = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": bos, "type_id": 0}}
        post_processor = {
            "type": "TemplateProcessing", "single": [start, text],
            "pair": [start, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
        }  # fmt: skip
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": pre == "llama-bpe",
        "vocab": {token: id for id, token in enumerate(tokens)}, "merges": metadata["tokenizer.ggml.merges"],
    }  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": PRE_TOKENIZERS[pre], "post_processor": post_processor, "decoder": BYTE_LEVEL, "model": model,
    }  # fmt: skip
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos, "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False, "model_max_length": metadata["llama.context_length"],
    }  # fmt: skip
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}
