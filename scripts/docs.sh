#!/usr/bin/env bash
# Remakes docs/: the results and the pictures of the README, by dry runs of about eight minutes.
# Then replace the README's table by what it prints at the end.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

setup_env requirements.txt requirements-dev.txt
# Made where git does not look, and moved at the end: results name the commit, and whether files differ from it.
work=results/docs
rm -rf "$work"
mkdir -p "$work" docs

OUT=$work/memory.jsonl DEVICE=cpu bash benchmarks.sh memory >/dev/null
mv "$work/memory.png" "$work/context.png"
OUT=$work/chunks.jsonl DEVICE=cpu MODEL=Llama-3.1-8B CONTEXTS=131072 MODES=int4wo-64+kv_quant+linear \
  CHUNKS="128 256 512 1024 2048 8192" bash benchmarks.sh memory

files=()
for flags in "--no-linear_causal_mask" "--no-linear_causal_mask --kv_cache_quantization" "--kv_cache_quantization" \
  "--kv_cache_quantization --quantization int4wo-64"; do
  files+=("$work/${#files[@]}.pickle")
  read -ra flags <<<"$flags"
  "$PY" generate.py --dry_run --random_weights Llama-3.1-8B --cache_size 131072 --prompt_tokens 131008 --max_new_tokens 64 \
    "${flags[@]}" --memory_profile "${files[-1]}" >/dev/null
done
"$PY" scripts/plot_memory.py "${files[@]}" --labels normal "+ quantized cache" "+ linear mask" "+ int4 weights" \
  --title "Llama-3.1-8B, context 131,072, filled" --out "$work/memory.png"
mv "$work"/{memory.jsonl,chunks.jsonl,memory.png,context.png} docs/
rm -rf "$work"
"$PY" scripts/plot_results.py docs/memory.jsonl --markdown --context 131072
