#!/usr/bin/env bash
# benchmarks.sh: the sweep of speed, every context x {normal, kv_quant, kv_quant+linear}, and at the smallest context the
# weight schemes. benchmarks.sh memory: the peak memory of those and of int4wo-64+kv_quant+linear, each with a prompt of 6
# tokens and with the context filled; simulated, and on a CUDA card measured too. A cell that fails is recorded and the sweep
# goes on; a table ends it. Status 1 if every cell failed. All from the environment:
#   MODEL           a checkpoint, or a known configuration's name. Random weights where there is no checkpoint of that name
#   OUT             JSON lines, appended to (default results/<date>.jsonl)
#   CONTEXTS MODES  slots of the KV cache; rows of the sweep (see below)
#   SCHEMES         weight schemes of the last mode at the smallest context, none for the weights as they are
#   DEVICE COMPILE  cpu, cuda, ... (default: cuda if present); COMPILE=1 compiles decode, as is the default on cuda
#   NUM_SAMPLES MAX_NEW_TOKENS
#   FLAGS           more flags of generate.py, split at spaces, such as "--prompt_tokens 4000 --precision float32"
# and for memory:
#   MODEL           known configurations, split at spaces (default: Llama-3.1-8B Llama-3.1-70B)
#   GPU CHUNKS      the simulated card; values of --prefill_chunk for the filled contexts (default: a100-80, 512)
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/scripts/common.sh"

mode_flags() {
  case $1 in
    normal) echo "--no-linear_causal_mask" ;;
    kv_quant) echo "--no-linear_causal_mask --kv_cache_quantization" ;;
    kv_quant+linear) echo "--kv_cache_quantization" ;;
    int4wo-64+kv_quant+linear) echo "--kv_cache_quantization --quantization int4wo-64" ;;
    *) say "MODES: $1 is none of normal, kv_quant, kv_quant+linear, int4wo-64+kv_quant+linear"; return 2 ;;
  esac
}

what=${1:-speed}
default_modes="normal kv_quant kv_quant+linear"
case "$# $what" in
  "0 speed" | "1 speed") MODEL=${MODEL:-checkpoints/SmolLM2-135M-Instruct} ;;
  "1 memory") MODEL=${MODEL:-Llama-3.1-8B Llama-3.1-70B} default_modes+=" int4wo-64+kv_quant+linear" ;;
  *) die "usage: benchmarks.sh [speed | memory]; all else comes from the environment" ;;
esac
OUT=${OUT:-results/$(date +%Y-%m-%d-%H%M%S).jsonl}
read -ra chunks <<<"${CHUNKS:-512}"
read -ra contexts <<<"${CONTEXTS:-8192 16384 32768 65536 131072}"
read -ra modes <<<"${MODES:-$default_modes}"
read -ra schemes <<<"${SCHEMES:-none int8wo int4wo-64}"
read -ra more <<<"${FLAGS:-}"
for mode in "${modes[@]}"; do mode_flags "$mode" >/dev/null || exit; done
for context in "${contexts[@]}"; do
  [[ $context =~ ^[1-9][0-9]*$ ]] || die "CONTEXTS: $context is no number of slots"
done
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

mkdir -p "$(dirname -- "$OUT")"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
interrupted=0 cells=0 failed=0
trap 'interrupted=1' INT # a cell ends itself at Ctrl-C, and records what it has

# cell FLAG...: one run of generate.py, its notes shown as they come; a failure becomes a line of OUT.
cell() {
  local status=0
  if [ "$interrupted" = 1 ]; then return; fi
  set -- generate.py "$@" ${more[@]+"${more[@]}"} --write_result "$OUT"
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

sweep_speed() {
  local common context mode scheme flags here name
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
  for context in "${contexts[@]}"; do
    for mode in "${modes[@]}"; do
      here=(none)
      if [ "$context" = "$smallest" ] && [ "$mode" = "$last_mode" ]; then here=("${schemes[@]}"); fi
      for scheme in "${here[@]}"; do
        read -ra flags <<<"--cache_size $context $(mode_flags "$mode")"
        if [ "$scheme" != none ]; then flags+=(--quantization "$scheme"); fi
        cell "${common[@]}" "${flags[@]}"
      done
    done
  done
}

# A filled context leaves room for the new tokens.
sweep_memory() {
  local new=${MAX_NEW_TOKENS:-64} models model context mode chunk flags
  read -ra models <<<"$MODEL"
  for model in "${models[@]}"; do
    for context in "${contexts[@]}"; do
      for mode in "${modes[@]}"; do
        read -ra flags <<<"--random_weights $model --cache_size $context --max_new_tokens $new $(mode_flags "$mode")"
        memory_cells "${flags[@]}" --prompt_tokens 6
        for chunk in "${chunks[@]}"; do
          memory_cells "${flags[@]}" --prompt_tokens $((context - new)) --prefill_chunk "$chunk"
        done
      done
    done
  done
}

memory_cells() {
  cell "$@" --dry_run --gpu "${GPU:-a100-80}"
  case $DEVICE in cuda*) cell "$@" --device "$DEVICE" ;; esac
}

case $what in
  speed) sweep_speed ;;
  memory) sweep_memory ;;
esac

printf '\n%s\n' "$cells cells, $failed failed, $SECONDS s; $OUT" >&2
status=0
if [ "$what" = memory ] && [ ${#chunks[@]} = 1 ]; then
  "$PY" scripts/plot_results.py "$OUT" --markdown || status=$?
  if "$PY" -c 'import matplotlib' 2>/dev/null; then
    "$PY" scripts/plot_results.py "$OUT" --out "${OUT%.jsonl}.png" 2>/dev/null || status=$?
  else
    say "for a picture: $PY -m pip install matplotlib, then $PY scripts/plot_results.py $OUT"
  fi
else
  "$PY" scripts/summarize.py "$OUT" || status=$?
fi
if [ "$interrupted" = 1 ]; then exit 130; fi
if [ "$failed" -eq "$cells" ]; then status=1; fi
exit "$status"
