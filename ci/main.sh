#!/usr/bin/env bash
# Set up, then a run from its data to its tables.   bash ci/main.sh [system.]profile [papermill arguments]
#   a section of settings.ini: mtdrive.quick (the default), mtdrive.laptop, driveagent.laptop, mtdrive.smoke, ...
#   A profile alone, such as `laptop`, is the first system's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
section=${1:-quick}
[ $# -gt 0 ] && shift
[ -n "${DRIVELIT_NO_SETUP:-}" ] || bash ci/setup.sh
venv=${DRIVELIT_VENV:-.venv}
[ -z "${DRIVELIT_NO_SETUP:-}" ] && PATH="$(cd "$venv" && pwd)/bin:$PATH"
resolved=$(python ci/systems.py "$section")
read -r system profile run <<<"$resolved"
out=runs/$system-$profile
mkdir -p "$out"
case " $* " in *" plan True "* | *" plan true "*) set -- "$@" --log-output ;; esac  # the page is read in the terminal

# What the stages are at: one line that moves on a terminal, else a line every half minute.
export DRIVELIT_STATUS=$PWD/$out/status.txt
rm -f "$DRIVELIT_STATUS"
show() {
  local line="" last=""
  while sleep "$([ -t 1 ] && echo 2 || echo 30)"; do
    line=$(cat "$DRIVELIT_STATUS" 2>/dev/null) || continue
    [ "$line" = "$last" ] && continue
    if [ -t 1 ]; then printf '\r\033[K%.*s' "$(($(tput cols 2>/dev/null || echo 80) - 1))" "$line"; else printf '%s\n' "$line"; fi
    last=$line
  done
}
show &
shown=$!
trap 'kill "$shown" 2>/dev/null || true; rm -f "$DRIVELIT_STATUS"' EXIT
papermill "$run" "$out/report.ipynb" -k python3 --cwd "$(dirname "$run")" --no-progress-bar \
  -p profile "$profile" -p out "$PWD/$out" "$@" \
  2> >(grep --line-buffered -v 'Kernel is running over TCP without encryption' >&2)
kill "$shown" 2>/dev/null || true
[ -t 1 ] && printf '\r\033[K'
echo "the executed notebook of $system: $out/report.ipynb"
for picture in "$out"/*.png; do if [ -e "$picture" ]; then echo "a picture: $picture"; fi; done
