#!/bin/bash
# Exit test of the probes on real SGLang with EAGLE-3, on a machine with one CUDA GPU and without a network.
#
#   benchmarks/sglang_probes_gpu.sh SITE MODEL WORK [more arguments of engine_probes.py]
#
# SITE holds SGLang and what it imports, MODEL is the embedded engine's model directory, WORK receives WORK/out and
# WORK/progress.log; WORK/done is written at the end. STEPS (3) is the number of draft steps.
set -u
site=$1 model=$2 work=$3
shift 3
steps=${STEPS:-3}
mkdir -p "$work"
export PYTHONPATH="$PWD/src:$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
rm -rf "$work/head" "$work/done"
cp -r "${HEAD_DIR:-src/specmeter/eagle/heads/smollm2-135m-v1}" "$work/head"
# SGLang's Llama adds 1 to the ids it reads: state H[k] is written as k-1.
python3 - "$work/head/config.json" <<'PYTHON'
import json, sys
path = sys.argv[1]
config = json.load(open(path))
config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [k - 1 for k in config["specmeter_capture"]]}
json.dump(config, open(path, "w"))
PYTHON
python3 benchmarks/engine_probes.py --out "$work/out" --engine sglang --device --loaded-only "$@" -- \
  python3 -m sglang.launch_server --model-path "$model" --dtype bfloat16 \
  --speculative-algorithm EAGLE3 --speculative-draft-model-path "$work/head" --speculative-num-steps "$steps" \
  --speculative-eagle-topk 1 --speculative-num-draft-tokens $((steps + 1)) \
  --attention-backend triton --sampling-backend pytorch --mem-fraction-static 0.3 --cuda-graph-max-bs 8 \
  --enable-metrics > "$work/progress.log" 2>&1
echo "exit $?" > "$work/done"
