"""Host memory and time of loading: python scripts/bench_load.py [--quantization int4wo-64] [--path CHECKPOINT]

Without --path, a sharded Hugging Face checkpoint of random bfloat16 weights, 1 GB, is made under --tmp. A thread samples
RssAnon, memory that is the process's own: pages of the mapped file are not in it, the system drops them at will.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

# A script's own folder is on the path, not the repository's root, where the modules stand.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import quantize
from checkpoint import open_checkpoint

LAYERS, DIM, HIDDEN, HEADS, KV_HEADS, VOCAB = 10, 2048, 5632, 16, 4, 32000


def make_checkpoint(folder: Path) -> Path:
    """Eleven shards in Hugging Face's names and order, with an index."""

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02)

    def shards() -> Iterator[dict[str, torch.Tensor]]:
        ones, kv = torch.ones(DIM, dtype=torch.bfloat16), DIM * KV_HEADS // HEADS
        ends = {"model.embed_tokens.weight": random(VOCAB, DIM), "lm_head.weight": random(VOCAB, DIM)}
        yield ends | {"model.norm.weight": ones}
        for i in range(LAYERS):
            shapes = {
                "self_attn.q_proj": (DIM, DIM), "self_attn.k_proj": (kv, DIM), "self_attn.v_proj": (kv, DIM),
                "self_attn.o_proj": (DIM, DIM), "mlp.gate_proj": (HIDDEN, DIM), "mlp.up_proj": (HIDDEN, DIM),
                "mlp.down_proj": (DIM, HIDDEN),
            }  # fmt: skip
            layer = {name: random(*shape) for name, shape in shapes.items()}
            layer |= {"input_layernorm": ones, "post_attention_layernorm": ones.clone()}
            yield {f"model.layers.{i}.{name}.weight": t for name, t in layer.items()}

    index = {}
    for i, shard in enumerate(shards()):
        file = f"model-{i + 1:05d}-of-{LAYERS + 1:05d}.safetensors"
        save_file(shard, folder / file)
        index |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = dict(
        model_type="llama", vocab_size=VOCAB, hidden_size=DIM, intermediate_size=HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=2048, rms_norm_eps=1e-5,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rss_anon() -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("RssAnon"))


def measure(path: Path, dtype: torch.dtype, quantization: str | None) -> dict:
    peak, done, before = 0, threading.Event(), rss_anon()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, rss_anon())

    thread, began = threading.Thread(target=sample), time.perf_counter()
    thread.start()
    checkpoint = open_checkpoint(path)
    model, _ = quantize.load_model(checkpoint, torch.device("cpu"), dtype, quantization)
    seconds = time.perf_counter() - began
    done.set()
    thread.join()
    files = checkpoint.path if checkpoint.path.is_file() else checkpoint.folder
    read = sum(f.stat().st_size for f in ([files] if files.is_file() else files.iterdir()) if f.suffix != ".json")
    kept = model.weight_bytes()
    return {
        "read_gb": read / 1e9,
        "model_gb": kept / 1e9,
        "rss_anon_growth_peak_gb": (peak - before) / 1e9,
        "rss_anon_growth_end_gb": (rss_anon() - before) / 1e9,
        "peak_over_larger": (peak - before) / max(read, kept),
        "peak_over_model": (peak - before) / kept,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure host memory and time of loading a checkpoint.")
    parser.add_argument("--path", type=Path, help="a checkpoint (default: 1 GB of random weights, made for this)")
    parser.add_argument("--quantization", choices=quantize.QUANTIZERS)
    parser.add_argument("--precision", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--tmp", help="where to make the checkpoint (default: the system's folder for temporary files)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.tmp) as folder:
        result = measure(args.path or make_checkpoint(Path(folder)), getattr(torch, args.precision), args.quantization)
    print(json.dumps({"quantization": args.quantization, "precision": args.precision} | result))


if __name__ == "__main__":
    main()
