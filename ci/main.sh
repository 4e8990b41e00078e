#!/usr/bin/env bash
# Set up, then a run from its data to its tables.   bash ci/main.sh [system.]profile [papermill arguments]
#   a section of settings.ini: mtdrive.laptop (the default), driveagent.laptop, mtdrive.smoke, ...
#   A profile alone, such as `smoke`, is the first system's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
section=${1:-laptop}
[ $# -gt 0 ] && shift
[ -n "${DRIVELIT_NO_SETUP:-}" ] || bash ci/setup.sh
venv=${DRIVELIT_VENV:-.venv}
[ -z "${DRIVELIT_NO_SETUP:-}" ] && PATH="$(cd "$venv" && pwd)/bin:$PATH"
resolved=$(python ci/systems.py "$section")
read -r system profile run <<<"$resolved"
out=runs/$system-$profile
mkdir -p "$out"
case " $* " in *" plan True "* | *" plan true "*) set -- "$@" --log-output ;; esac  # the page is read in the terminal
papermill "$run" "$out/report.ipynb" -k python3 --cwd "$(dirname "$run")" \
  -p profile "$profile" -p out "$PWD/$out" "$@"
echo "the executed notebook of $system: $out/report.ipynb"
