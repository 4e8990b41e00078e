#!/usr/bin/env bash
# Set up, then the main job: data, supervised tuning, mtGRPO, evaluation.   bash ci/main.sh [profile] [papermill arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
profile=${1:-laptop}
[ $# -gt 0 ] && shift
[ -n "${DRIVELIT_NO_SETUP:-}" ] || bash ci/setup.sh
venv=${DRIVELIT_VENV:-.venv}
[ -d "$venv" ] && PATH="$PWD/$venv/bin:$PATH"
mkdir -p "runs/$profile"
papermill nbs/50_mtdrive/30_run.ipynb "runs/$profile/report.ipynb" -k python3 --cwd nbs/50_mtdrive \
  -p profile "$profile" -p out "$PWD/runs/$profile" "$@"
echo "the executed notebook: runs/$profile/report.ipynb"
