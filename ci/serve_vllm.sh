#!/usr/bin/env bash
# Serve a checkpoint with vLLM, in an environment of its own (vLLM and this kit pin different versions of torch), to
# VLLMEngine, which plays for the trainer, and to OpenAIEngine, for teachers and judges.
#   bash ci/serve_vllm.sh Qwen/Qwen2.5-VL-7B-Instruct [PORT] [more flags of `vllm serve`]
# By the environment: HOST (127.0.0.1) the address that it listens on, TENSOR_PARALLEL (1) GPUs of one server,
# MAX_MODEL_LEN (11500) tokens of a conversation, IMAGES (6) pictures of a conversation, LORA_RANK (0: none) of adapters
# by name, DEV (1) whether it takes new weights, VLLM_ENV (.venv-vllm) the environment's folder.
#
# DEV=1 sets VLLM_SERVER_DEV_MODE=1, and a rank sets VLLM_ALLOW_RUNTIME_LORA_UPDATING: whoever reaches the port can
# then call methods of the server, make it read files, pause it and give it other weights. So it listens on this
# machine only, unless HOST says otherwise: an address in a private network, never one that the world can reach.
set -euo pipefail
VERSION=0.31.0  # its token endpoint and weight routes are what drivelit.policy.vllm was written against
model=${1:?usage: serve_vllm.sh MODEL [PORT] [FLAGS]}
port=${2:-8000}
shift $(($# < 2 ? $# : 2))
home=${VLLM_ENV:-.venv-vllm}
[ -x "$home/bin/vllm" ] || python3 -m venv "$home"
there=$("$home/bin/pip" list --format freeze 2>/dev/null | grep '^vllm==' || true)
[ "$there" = "vllm==$VERSION" ] || "$home/bin/pip" install --quiet "vllm==$VERSION"
export VLLM_SERVER_DEV_MODE=${DEV:-1}
lora=()
if [ "${LORA_RANK:-0}" -gt 0 ]; then
  export VLLM_ALLOW_RUNTIME_LORA_UPDATING=True
  lora=(--enable-lora --max-lora-rank "$LORA_RANK")
fi
# --generation-config vllm: without it the checkpoint's own sampling (a repetition penalty) is applied in silence.
# processed_logprobs: those of the words as they are drawn, at the temperature of play; raw ones are vLLM's default.
exec "$home/bin/vllm" serve "$model" --host "${HOST:-127.0.0.1}" --port "$port" \
  --tensor-parallel-size "${TENSOR_PARALLEL:-1}" --max-model-len "${MAX_MODEL_LEN:-11500}" \
  --limit-mm-per-prompt "{\"image\": ${IMAGES:-6}}" --generation-config vllm \
  --enable-scale-out --logprobs-mode processed_logprobs "${lora[@]}" "$@"
