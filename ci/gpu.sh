#!/usr/bin/env bash
# Where a GPU is: a real vLLM (ci/serve_vllm.sh) against the policy in this process, on a toy of the real class with the
# real tokenizer and image processor. NOT YET RUN ON A GPU: written from vLLM's source, tried against the stub alone.
#   bash ci/gpu.sh [MODEL]        default: Qwen/Qwen2.5-VL-3B-Instruct, whose tokenizer is read from the hub
# It compares tokens and log-probabilities, gives the server new weights, compares again, and writes what it measured to
# ci/records/vllm-DATE.md, which is to be committed. Set DRIVELIT_VENV to the kit's environment. About ten minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
model=${1:-Qwen/Qwen2.5-VL-3B-Instruct}
port=${PORT:-8123}
python=${DRIVELIT_VENV:-.venv}/bin/python
work=$(mktemp -d)
"$python" ci/gpu.py make "$model" "$work/toy"
MAX_MODEL_LEN=4096 bash ci/serve_vllm.sh "$work/toy" "$port" --gpu-memory-utilization 0.3 >"$work/server.log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null || true; wait $server 2>/dev/null || true; rm -rf "$work"' EXIT
for _ in $(seq 180); do
  curl -sf "http://127.0.0.1:$port/health" >/dev/null && break
  kill -0 $server 2>/dev/null || { tail -40 "$work/server.log"; echo "the server has ended"; exit 1; }
  sleep 5
done
"$python" ci/gpu.py compare "$work/toy" "http://127.0.0.1:$port" "$work/weights" \
  || { tail -40 "$work/server.log"; exit 1; }
