#!/usr/bin/env bash
# Set up, then a run from its data to its tables.   bash ci/main.sh [system.]profile [papermill arguments]
#   a section of settings.ini: mtdrive.laptop (the default; `laptop` is short for it), driveagent.laptop, mtdrive.smoke, ...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
section=${1:-laptop}
[ $# -gt 0 ] && shift
case $section in
  *.*) system=${section%%.*} profile=${section#*.} name=$section ;;
  *) system=mtdrive profile=$section name=$section ;;
esac
case $system in
  mtdrive) run=nbs/50_mtdrive/30_run.ipynb ;;
  driveagent) run=nbs/51_driveagent/70_run.ipynb ;;
  *) echo "system '$system' is not mtdrive or driveagent" >&2; exit 2 ;;
esac
[ -n "${DRIVELIT_NO_SETUP:-}" ] || bash ci/setup.sh
venv=${DRIVELIT_VENV:-.venv}
[ -d "$venv" ] && PATH="$(cd "$venv" && pwd)/bin:$PATH"
mkdir -p "runs/$name"
papermill "$run" "runs/$name/report.ipynb" -k python3 --cwd "$(dirname "$run")" -p profile "$profile" -p out "$PWD/runs/$name" "$@"
echo "the executed notebook: runs/$name/report.ipynb"
