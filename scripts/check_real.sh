#!/usr/bin/env bash
# The chunk matrix on the default model, to the bit: scripts/check_real.sh [--quick]
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

bash scripts/fetch_default_model.sh
exec "$PY" scripts/check_real.py "$@"
