#!/usr/bin/env bash
# From the hub to a checkpoint that loads fast: scripts/prepare.sh ORGANISATION/NAME [SCHEME]
# Sets up, downloads, converts and, where a SCHEME such as int4wo-64 is named, quantizes. A step whose result is there is
# skipped. From the environment: CHECKPOINTS (the folder for all of it), REVISION (branch, tag or commit), ORIGINAL=1 (Meta's
# own files instead of Hugging Face's), HF_TOKEN.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

if [ $# -lt 1 ] || [ $# -gt 2 ]; then
  say "usage: scripts/prepare.sh ORGANISATION/NAME [SCHEME]"
  exit 2
fi
repo=$1 scheme=${2:-}
folder=${CHECKPOINTS:-checkpoints}/$repo
flat=$folder-flat
flags=(--out "$folder")
if [ -n "${REVISION:-}" ]; then flags+=(--revision "$REVISION"); fi
if [ "${ORIGINAL:-0}" = 1 ]; then flags+=(--original); fi

setup_env requirements.txt
# Every step writes a hidden folder and renames it at the end: a folder that is there is complete.
if [ ! -d "$flat" ]; then
  if [ ! -d "$folder" ]; then
    "$PY" -c 'import huggingface_hub' 2>/dev/null ||
      "$PY" -m pip install --disable-pip-version-check huggingface_hub >&2
    "$PY" scripts/download.py "$repo" "${flags[@]}"
  fi
  "$PY" scripts/convert_hf_checkpoint.py --checkpoint_path "$folder" --out "$flat"
fi
result=$flat
if [ -n "$scheme" ]; then
  result=$folder-$scheme
  [ -d "$result" ] || "$PY" quantize.py --checkpoint_path "$flat" --quantization "$scheme" --out "$result"
  [ -d "$result" ] || die "quantize.py did not write $result"
fi
say "ready: $PY generate.py --checkpoint_path $result"
