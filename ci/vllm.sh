#!/usr/bin/env bash
# A real vLLM on this machine, also without a GPU: install it, serve small policies with ci/serve_vllm.sh, and check that
# it and the policy in this process say the same; then the smoke runs of the four systems whose servers play.
#   bash ci/vllm.sh [--record] [--only server,transfer,untied,mtdrive,driveagent,autodrive_p3,minddriver]
# --record writes nbs/80_testing/golden/vllm*.json anew: the answers of the real server with which the stub is tested.
# DRIVELIT_NO_SETUP=1 uses the python that is active, else ci/setup.sh makes .venv. VLLM_ENV (.venv-vllm) is the server's
# environment, WORK (a new folder, removed at the end) where policies, weights and logs lie.
# About 20 minutes on two cores, of which 5 install vLLM (3.5 GB).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -n "${DRIVELIT_NO_SETUP:-}" ] || bash ci/setup.sh
venv=${DRIVELIT_VENV:-.venv}
[ -n "${DRIVELIT_NO_SETUP:-}" ] || PATH="$(cd "$venv" && pwd)/bin:$PATH"
export VLLM_ENV=${VLLM_ENV:-$PWD/.venv-vllm}
export PATH PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
bash ci/serve_vllm.sh --install
if [ -z "${WORK:-}" ]; then
  WORK=$(mktemp -d)
  trap 'rm -rf "$WORK"' EXIT
fi
mkdir -p "$WORK"
python ci/real_vllm.py "$WORK" "$@"
