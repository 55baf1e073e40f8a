#!/usr/bin/env bash
# Sets everything up and answers one prompt: scripts/quickstart.sh ["PROMPT" [flags of generate.py]]
# The answer goes to stdout, everything else to stderr.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

bash scripts/fetch_default_model.sh
root=$PWD
cd -- "$OLDPWD" # paths among the flags are meant from where the user stands
exec "$root/$PY" "$root/generate.py" --chat --temperature 0 --prompt="${1-What is the capital of France?}" "${@:2}"
