#!/usr/bin/env bash
# Set up, then every rehearsal: the seven profiles of the papers' size, a server, papermill, Ray.
#   bash ci/rehearse.sh [NAME]
#   NAME: only the tests whose names have it, or an expression of pytest's -k
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -n "${DRIVELIT_NO_SETUP:-}" ] || bash ci/setup.sh
venv=${DRIVELIT_VENV:-.venv}
[ -n "${DRIVELIT_NO_SETUP:-}" ] || PATH="$(cd "$venv" && pwd)/bin:$PATH"
unset PYTHONDONTWRITEBYTECODE  # every stage is a process of its own
export PATH OMP_NUM_THREADS=1 DRIVELIT_REHEARSE=all
exec python -m pytest -v --durations=0 tests/test_rehearsal.py tests/test_cluster.py::test_a_rehearsal_on_two_machines \
  -k "${1:-test}"
