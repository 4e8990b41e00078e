#!/usr/bin/env bash
# Other people's trainers at our tasks, in an environment of its own: verifiers, SkyRL-gym and verl, each by its own
# loop or classes. verl names an older transformers than the pinned one, and vLLM; without dependencies its dataset,
# agent loop, reward manager and table of advantages run on ours, without a GPU. Other versions: ci/constraints.txt.
#   bash ci/environments.sh [--record]     --record writes nbs/65_bridges/golden/verifiers.json anew
# ENVIRONMENTS_ENV (.venv-environments) is the environment; one that has the three is taken as it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1:-}" in
  "") ;;
  --record) export DRIVELIT_RECORD=1 ;;
  *) echo "ci/environments.sh: $1? There is --record" >&2; exit 2 ;;
esac
venv=${ENVIRONMENTS_ENV:-.venv-environments}
there='import importlib.metadata as m; [m.version(p) for p in ("verifiers", "skyrl-gym", "verl")]'
if ! "$venv/bin/python" -c "$there" 2>/dev/null; then
  "${PYTHON:-python3.11}" -m venv --clear "$venv"
  torch=$(sed -n 's/^\(torch==[0-9.]*\).*/\1/p' ci/constraints.txt)
  [ "$(uname -s)" = Linux ] && torch="$torch+cpu"
  pip=("$venv/bin/python" -m pip --disable-pip-version-check install -q)
  pins=(-c ci/constraints.txt)
  "${pip[@]}" "${pins[@]}" "$torch" ||
    "${pip[@]}" "${pins[@]}" --extra-index-url https://download.pytorch.org/whl/cpu "$torch"
  "${pip[@]}" "${pins[@]}" -e '.[skyrl,train,verifiers]' fastcore pytest \
    cachetools codetiming==1.4.0 hydra-core==1.3.8 "omegaconf<2.4" ray fastapi uvicorn orjson
  "${pip[@]}" --no-deps verl==0.9.1 tensordict==0.10.0 pyvers==0.1.0 importlib_metadata torchdata==0.11.0
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
"$venv/bin/python" -c "$there"  # without them the tests would be skipped
"$venv/bin/python" -m pytest -q tests/test_verifiers.py tests/test_skyrl.py tests/test_verl.py
