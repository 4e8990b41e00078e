#!/usr/bin/env bash
# Set up, then every test.   bash ci/test.sh [quick]
#   quick: two minutes on two cores: what is said below in `quick`
#   DRIVELIT_NO_SETUP=1   use the python that is active    DRIVELIT_SAMPLES   folder of recorded driving samples, else those cells skip
#   DRIVELIT_SLOW=0       leave out `#| slow` cells
#   DRIVELIT_WORKERS      notebooks at a time, and as many files of tests beside them (2)
#   DRIVELIT_THREADS      of one process (1)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
what=${1:-all}
case $what in all | quick) ;; *) echo "ci/test.sh: $what? It takes the word quick, or none" >&2; exit 2 ;; esac
[ -n "${DRIVELIT_NO_SETUP:-}" ] || bash ci/setup.sh || exit 1
venv=${DRIVELIT_VENV:-.venv}
[ -z "${DRIVELIT_NO_SETUP:-}" ] && PATH="$(cd "$venv" && pwd)/bin:$PATH"
export PATH OMP_NUM_THREADS=${DRIVELIT_THREADS:-1} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
unset MPLBACKEND PYTHONDONTWRITEBYTECODE  # without byte code every kernel compiles the package anew
[ "${DRIVELIT_THREADS:-1}" = 1 ] || export OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0  # threads that spin take the cores from each other
summary=() failures=0 start=$SECONDS workers=${DRIVELIT_WORKERS:-2}

step() {  # step NAME COMMAND...: runs it, shows its output, keeps the verdict
  local name=$1 begin=${begun:-$SECONDS} verdict=ok; shift
  printf '\n== %s\n' "$name"
  "$@" 2>&1 | grep --line-buffered -v 'Kernel is running over TCP without encryption'
  [ "${PIPESTATUS[0]}" = 0 ] || { verdict=FAILED; failures=$((failures + 1)); }
  summary+=("$(printf '%-7s %4d s  %s' "$verdict" $((SECONDS - begin)) "$name")")
}

slow=(); [ "${DRIVELIT_SLOW:-1}" = 1 ] && slow=(--slow)
tests=(tests)
if [ "$what" = quick ]; then  # sizes, words, links, profiles, figures, and the notebooks that take two seconds at most
  tests=(tests/test_{commands,core,fidelity,figures,architecture,settings}.py)
  slow=(--up-to 2)
fi

# Tests wait, for Ray, for servers, for processes that are killed; notebooks compute. Side by side they fill the cores.
notebooks() {
  python ci/notebooks.py --workers "$workers" --limit "${DRIVELIT_LIMIT:-1800}" "${slow[@]}" >"$kept/said" 2>&1
  echo $? >"$kept/code"
}
they_ended() { until [ -f "$kept/code" ]; do sleep 1; done; cat "$kept/said"; return "$(cat "$kept/code")"; }
kept=$(mktemp -d) beside=$SECONDS
notebooks & pid=$!
trap 'pkill -TERM -P $pid; kill $pid; rm -rf "$kept"; exit 130' INT TERM

step "lint" ruff check .
step "format" ruff format --check nbs ci tests
step "the package is what the notebooks export, and they are clean" bash ci/drift.sh
step "the map in nbs/index.ipynb is what the notebooks say, and the README one page" python ci/readme.py --check

step "tests" python -m pytest -q -n "$workers" --dist loadfile --no-loadscope-reorder --durations=10 "${tests[@]}"
begun=$beside step "every notebook runs, beside the tests" they_ended
trap - INT TERM; rm -rf "$kept"

printf '\n== summary\n'
printf '%s\n' "${summary[@]}"
printf '%d failed, %d minutes %d seconds\n' "$failures" $(((SECONDS - start) / 60)) $(((SECONDS - start) % 60))
[ -n "${DRIVELIT_SAMPLES:-}" ] || echo "DRIVELIT_SAMPLES is not set: the cells on recorded driving were skipped"
[ "$failures" = 0 ]
