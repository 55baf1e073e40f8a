"""Turns a GGUF file of a llama into a checkpoint folder: python scripts/convert_gguf.py FILE.gguf OUT_FOLDER

Weights become float32, where the values of every quantized format are exact. llama.cpp keeps the rows of q and k in
the order that Meta's RoPE wants, neighbours forming pairs, and so does this project: nothing is permuted.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from tqdm import tqdm

# A script's own folder is on the path, not the repository's root, where the modules stand.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from checkpoint import write_checkpoint
from model import ModelArgs
from tokenizer import LLAMA3_PATTERN

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
# tokenizer.ggml.pre -> the same splitting in Hugging Face's terms
PRE_TOKENIZERS = {
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]},
    "llama-bpe": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False},
            BYTE_LEVEL | {"use_regex": False},
        ],
    },
    "gpt-2": BYTE_LEVEL,
}


def open_gguf(file: Path) -> gguf.GGUFReader:
    """The file's index. The library fails in many ways on a damaged file: all of them become one ValueError."""
    try:
        return gguf.GGUFReader(file)
    except OSError:
        raise  # its message says what is wrong: absent, a folder, not readable
    except Exception as error:
        raise ValueError(f"damaged, or no GGUF file ({error}); download it again") from error


def read_metadata(reader: gguf.GGUFReader) -> dict:
    """All keys of the file; a foreign architecture and a scaled RoPE are refused."""
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise ValueError(f"its architecture is {architecture!r}: only llama is converted")
    scaled = [key for key in metadata if key.startswith("llama.rope.scaling.") and metadata[key] != "none"]
    scaled += [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_")]
    if scaled:
        raise ValueError(f"it has a scaled RoPE ({', '.join(scaled)}), which is not converted yet")
    return metadata


def model_args(metadata: dict, tensors: dict[str, gguf.ReaderTensor], name: str) -> ModelArgs:
    """The model's shape. A rate stored in float32 becomes the shortest decimal: 9.99999975e-06 is 1e-05."""
    n_head, dim = metadata["llama.attention.head_count"], metadata["llama.embedding_length"]
    return ModelArgs(
        name=name,
        block_size=metadata["llama.context_length"],
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        n_layer=metadata["llama.block_count"],
        n_head=n_head,
        n_local_heads=metadata.get("llama.attention.head_count_kv", n_head),
        dim=dim,
        intermediate_size=metadata["llama.feed_forward_length"],
        head_dim=metadata.get("llama.attention.key_length", dim // n_head),
        rope_base=shortest(metadata.get("llama.rope.freq_base", 10000.0)),
        norm_eps=shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        tie_word_embeddings="output.weight" not in tensors,
    )


def shortest(value: float) -> float:
    return float(str(np.float32(value)))


def name_map(args: ModelArgs) -> dict[str, tuple[list[tuple[str, int]], int]]:
    """Meta's name -> (the file's tensors stacked to it, each with its rows; columns, 0 for a vector)."""
    q, kv = args.n_head * args.head_dim, args.n_local_heads * args.head_dim
    names = {"tok_embeddings": ([("token_embd", args.vocab_size)], args.dim)}
    for i in range(args.n_layer):
        ours, theirs = f"layers.{i}", f"blk.{i}"
        names |= {
            f"{ours}.attention.wqkv": (
                [(f"{theirs}.attn_q", q), (f"{theirs}.attn_k", kv), (f"{theirs}.attn_v", kv)],
                args.dim,
            ),
            f"{ours}.attention.wo": ([(f"{theirs}.attn_output", args.dim)], q),
            f"{ours}.feed_forward.w1": ([(f"{theirs}.ffn_gate", args.intermediate_size)], args.dim),
            f"{ours}.feed_forward.w2": ([(f"{theirs}.ffn_down", args.dim)], args.intermediate_size),
            f"{ours}.feed_forward.w3": ([(f"{theirs}.ffn_up", args.intermediate_size)], args.dim),
            f"{ours}.attention_norm": ([(f"{theirs}.attn_norm", args.dim)], 0),
            f"{ours}.ffn_norm": ([(f"{theirs}.ffn_norm", args.dim)], 0),
        }
    names["norm"] = ([("output_norm", args.dim)], 0)
    if not args.tie_word_embeddings:
        names["output"] = ([("output", args.vocab_size)], args.dim)
    return names


def check_tensors(names: dict, tensors: dict[str, gguf.ReaderTensor]) -> None:
    """The file holds the tensors of its own metadata, no fewer, no more, no others."""
    # GGUF names the fastest dimension first: a matrix of R rows and C columns has the shape [C, R].
    wanted = {
        f"{name}.weight": (columns, rows) if columns else (rows,)
        for parts, columns in names.values()
        for name, rows in parts
    }
    for name in sorted(wanted.keys() ^ tensors.keys()):
        raise ValueError(f"tensor {name} is {'missing' if name in wanted else 'not part of a llama'}")
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"tensor {name} has the shape {tuple(map(int, tensors[name].shape))}, not {shape}")


def read_tensors(names: dict, tensors: dict[str, gguf.ReaderTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """(Meta's name, float32 tensor), dequantized one at a time."""
    # disable=None: a bar on a terminal, nothing in a log
    for name, (parts, _) in tqdm(names.items(), desc="converting", unit="tensor", disable=None):
        arrays = []
        for part, _ in parts:
            tensor = tensors[f"{part}.weight"]
            arrays.append(gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False))
        yield f"{name}.weight", torch.from_numpy(np.concatenate(arrays))


def tokenizer_files(metadata: dict) -> dict[str, dict]:
    """Hugging Face's `tokenizer.json` and `tokenizer_config.json`, by name."""
    kind, pre = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ValueError(
            f"its tokenizer is {kind!r} with the pre-tokenizer {pre!r}: only gpt2 with {known} is converted"
        )
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    special = {gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": id, "content": token} | flags | {"special": type in special}
        for id, (token, type) in enumerate(zip(tokens, types, strict=True))
        if type in special | {gguf.TokenType.USER_DEFINED}
    ]
    bos_id, eos_id = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    bos, eos = (None if id is None else tokens[id] for id in (bos_id, eos_id))
    # llama.cpp's rule for files that do not say: Llama 3 starts with BOS, the others do not.
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")
    post_processor = None
    if add_bos:
        text, start = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": bos, "type_id": 0}}
        post_processor = {
            "type": "TemplateProcessing",
            "single": [start, text],
            "pair": [start, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
        }
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": pre == "llama-bpe",
        "vocab": {token: id for id, token in enumerate(tokens)},
        "merges": metadata["tokenizer.ggml.merges"],
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": PRE_TOKENIZERS[pre],
        "post_processor": post_processor,
        "decoder": BYTE_LEVEL,
        "model": model,
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "add_bos_token": add_bos,
    }
    config |= {"clean_up_tokenization_spaces": False, "model_max_length": metadata["llama.context_length"]}
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


def convert(file: Path, out: Path, name: str) -> None:
    """Writes the whole checkpoint beside `out` and renames it at the end, so that `out` is complete or not there."""
    reader = open_gguf(file)
    try:
        metadata, tensors = read_metadata(reader), {tensor.name: tensor for tensor in reader.tensors}
        args = model_args(metadata, tensors, name)
        names, files = name_map(args), tokenizer_files(metadata)
        check_tensors(names, tensors)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"damaged: its metadata lack or confuse something ({error!r}); download it again") from error
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        write_checkpoint(partial, args, read_tensors(names, tensors))
        for file_name, content in files.items():
            (partial / file_name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Turn a llama's GGUF file into a checkpoint folder.")
    parser.add_argument("file", type=Path, metavar="FILE.gguf")
    parser.add_argument("out", type=Path, metavar="OUT_FOLDER", help="must not exist yet, or be empty")
    parser.add_argument("--name", help="the model's name in reports (default: the name of OUT_FOLDER)")
    args = parser.parse_args()
    out = args.out.resolve()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        print(f"{args.out}: there already; remove it or name another folder", file=sys.stderr)
        return 2
    try:
        convert(args.file, out, args.name or out.name)
    except (ValueError, OSError) as error:
        print(f"{args.file}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
