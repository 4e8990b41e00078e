#!/usr/bin/env bash
# Serve a checkpoint to OpenAIEngine with vLLM, in an environment of its own (vLLM and this kit pin different versions of torch).
#   bash ci/serve_vllm.sh Qwen/Qwen2.5-VL-7B-Instruct [port]
set -euo pipefail
model=${1:?usage: serve_vllm.sh MODEL [PORT]}
port=${2:-8000}
home=${VLLM_ENV:-.venv-vllm}
[ -x "$home/bin/vllm" ] || { python3 -m venv "$home" && "$home/bin/pip" install --quiet vllm; }
exec "$home/bin/vllm" serve "$model" --port "$port" --limit-mm-per-prompt '{"image": 6}' --max-model-len "${MAX_MODEL_LEN:-11500}"
