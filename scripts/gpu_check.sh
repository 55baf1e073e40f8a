#!/usr/bin/env bash
# What must be learned on a CUDA card, in under five minutes and on random weights:
# scripts/gpu_check.sh [--only PART ...] [--json FILE] [--out FOLDER]
# PYTHON names the interpreter; else the virtual environment's, else python3. Without a card it runs at small sizes on the CPU.
set -euo pipefail
scripts=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

if [ -z "${PYTHON:-}" ]; then
  PYTHON=$scripts/../.venv/bin/python
  [ -x "$PYTHON" ] || PYTHON=python3
fi
exec "$PYTHON" "$scripts/gpu_check.py" "$@"
