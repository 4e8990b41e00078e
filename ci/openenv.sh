#!/usr/bin/env bash
# OpenEnv's own client at a server of ours, in an environment of its own: openenv-core brings gradio, which wants an
# older Pillow than the pinned one. All other versions are those of ci/constraints.txt.
#   bash ci/openenv.sh [--record]     --record writes nbs/65_bridges/golden/openenv.json anew
# OPENENV_ENV (.venv-openenv) is the environment; one that has openenv-core is taken as it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1:-}" in
  "") ;;
  --record) export DRIVELIT_RECORD=1 ;;
  *) echo "ci/openenv.sh: $1? There is --record" >&2; exit 2 ;;
esac
venv=${OPENENV_ENV:-.venv-openenv}
if ! "$venv/bin/python" -c 'import importlib.metadata as m; m.version("openenv-core")' 2>/dev/null; then
  "${PYTHON:-python3.11}" -m venv --clear "$venv"
  pins=$(mktemp)
  trap 'rm -f "$pins"' EXIT
  grep -v '^pillow==' ci/constraints.txt >"$pins"
  torch=$(sed -n 's/^\(torch==[0-9.]*\).*/\1/p' ci/constraints.txt)
  [ "$(uname -s)" = Linux ] && torch="$torch+cpu"
  pip=("$venv/bin/python" -m pip --disable-pip-version-check install -q -c "$pins")
  "${pip[@]}" "$torch" || "${pip[@]}" --extra-index-url https://download.pytorch.org/whl/cpu "$torch"
  "${pip[@]}" -e '.[openenv,train]' fastcore pytest
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
"$venv/bin/python" -c 'import openenv.core'  # without it the tests would be skipped
"$venv/bin/python" -m pytest -q tests/test_openenv.py
