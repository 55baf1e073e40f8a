#!/usr/bin/env bash
# The sweep: every context x {normal, kv_quant, kv_quant+linear}, and at the smallest context the weight schemes. A cell that
# fails is recorded and the sweep goes on; a table ends it. Status 1 if every cell failed. All from the environment:
#   MODEL           a checkpoint, or a known configuration's name. Random weights where there is no checkpoint of that name
#   OUT             JSON lines, appended to (default results/<date>.jsonl)
#   CONTEXTS MODES  slots of the KV cache; rows of the sweep (see below)
#   SCHEMES         weight schemes of the last mode at the smallest context, none for the weights as they are
#   DEVICE COMPILE  cpu, cuda, ... (default: cuda if present); COMPILE=1 compiles decode, as is the default on cuda
#   NUM_SAMPLES MAX_NEW_TOKENS
#   FLAGS           more flags of generate.py, split at spaces, such as "--prompt_tokens 4000 --precision float32"
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/scripts/common.sh"

mode_flags() {
  case $1 in
    normal) echo "--no-linear_causal_mask" ;;
    kv_quant) echo "--no-linear_causal_mask --kv_cache_quantization" ;;
    kv_quant+linear) echo "--kv_cache_quantization" ;;
    *) say "MODES: $1 is none of normal, kv_quant, kv_quant+linear"; return 2 ;;
  esac
}

MODEL=${MODEL:-checkpoints/SmolLM2-135M-Instruct}
OUT=${OUT:-results/$(date +%Y-%m-%d-%H%M%S).jsonl}
read -ra contexts <<<"${CONTEXTS:-8192 16384 32768 65536 131072}"
read -ra modes <<<"${MODES:-normal kv_quant kv_quant+linear}"
read -ra schemes <<<"${SCHEMES:-none int8wo int4wo-64}"
read -ra more <<<"${FLAGS:-}"
for mode in "${modes[@]}"; do mode_flags "$mode" >/dev/null || exit; done
last_mode=$mode
smallest=$(printf '%s\n' "${contexts[@]}" | sort -n | head -n 1)

# The virtual environment; or on a machine that has all of it already, its own Python.
if [ ! -x "$PY" ] && "$PYTHON" -c 'import torch, safetensors, gguf, tiktoken, jinja2' 2>/dev/null; then
  PY=$PYTHON
else
  setup_env requirements.txt
fi
DEVICE=${DEVICE:-$("$PY" -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')}
case $DEVICE in cuda*) COMPILE=${COMPILE:-1} ;; esac

common=(--device "$DEVICE" --num_samples "${NUM_SAMPLES:-3}" --max_new_tokens "${MAX_NEW_TOKENS:-100}" --ignore_eos)
if [ "${COMPILE:-0}" = 1 ]; then common+=(--compile); fi
if [ -e "$MODEL" ]; then
  common+=(--checkpoint_path "$MODEL")
else
  # the configuration that a folder of this name would have
  name=$(basename -- "$MODEL" | sed -E 's/^Meta-//; s/(-hf|-chat|-Instruct)+$//')
  say "no checkpoint at '$MODEL': random weights of $name"
  common+=(--random_weights "$name")
fi
mkdir -p "$(dirname -- "$OUT")"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
interrupted=0 cells=0 failed=0
trap 'interrupted=1' INT # a cell ends itself at Ctrl-C, and records what it has

# cell CONTEXT MODE SCHEME: one run, its notes shown as they come; a failure becomes a line of OUT.
cell() {
  local flags=() status=0
  read -ra flags <<<"--cache_size $1 $(mode_flags "$2")"
  if [ "$3" != none ]; then flags+=(--quantization "$3"); fi
  set -- generate.py "${common[@]}" "${flags[@]}" ${more[@]+"${more[@]}"} --write_result "$OUT"
  printf '\n%s\n' "$*" >&2
  # Where memory runs out, the system shall end the cell and nothing else.
  (
    echo 1000 2>/dev/null >/proc/self/oom_score_adj || :
    exec "$PY" "$@" 2>&1 >/dev/null
  ) | tee -i "$log" >&2 || status=${PIPESTATUS[0]}
  cells=$((cells + 1))
  if [ "$status" -eq 0 ] || [ "$status" -eq 130 ]; then return; fi
  failed=$((failed + 1))
  say "failed with status $status"
  local error
  error=$(grep -v '^[[:space:]]*$' "$log" | tail -n 1) || error="no message"
  if [ "$status" -gt 128 ]; then error="killed, perhaps for want of memory"; fi
  "$PY" -c 'import datetime, json, shlex, sys
error, status, *command = sys.argv[1:]
date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
print(json.dumps({"date": date, "command": shlex.join(["python", *command]), "error": error, "status": int(status)}))
' "$error" "$status" "$@" >>"$OUT"
}

for context in "${contexts[@]}"; do
  for mode in "${modes[@]}"; do
    here=(none)
    if [ "$context" = "$smallest" ] && [ "$mode" = "$last_mode" ]; then here=("${schemes[@]}"); fi
    for scheme in "${here[@]}"; do
      if [ "$interrupted" = 0 ]; then cell "$context" "$mode" "$scheme"; fi
    done
  done
done

printf '\n%s\n' "$cells cells, $failed failed, $SECONDS s; $OUT" >&2
status=0
"$PY" scripts/summarize.py "$OUT" || status=$?
if [ "$interrupted" = 1 ]; then exit 130; fi
if [ "$failed" -eq "$cells" ]; then status=1; fi
exit "$status"
