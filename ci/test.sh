#!/usr/bin/env bash
# Set up, then every test.   bash ci/test.sh [quick]
#   quick: three minutes on two cores: what is said below in `quick`
#   DRIVELIT_NO_SETUP=1   use the python that is active    DRIVELIT_SAMPLES   folder of recorded driving samples, else those cells skip
#   DRIVELIT_SLOW=0       leave out `#| slow` cells
#   DRIVELIT_WORKERS      notebooks (2) or files of tests (3: they wait) at a time    DRIVELIT_THREADS   of one process (1)
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
summary=() failures=0 start=$SECONDS

step() {  # step NAME COMMAND...: runs it, shows its output, keeps the verdict
  local name=$1 begin=$SECONDS verdict=ok; shift
  printf '\n== %s\n' "$name"
  "$@" 2>&1 | grep --line-buffered -v 'Kernel is running over TCP without encryption'
  [ "${PIPESTATUS[0]}" = 0 ] || { verdict=FAILED; failures=$((failures + 1)); }
  summary+=("$(printf '%-7s %4d s  %s' "$verdict" $((SECONDS - begin)) "$name")")
}

slow=(); [ "${DRIVELIT_SLOW:-1}" = 1 ] && slow=(--slow)
tests=(tests)
if [ "$what" = quick ]; then  # sizes, words, links, profiles, figures, and the notebooks that take two seconds at most
  tests=(tests/test_{commands,core,fidelity,figures,house,settings}.py)
  slow=(--up-to 2)
fi

step "lint" ruff check .
step "format" ruff format --check nbs ci tests
step "the package is what the notebooks export, and they are clean" bash ci/drift.sh
step "the map in nbs/index.ipynb is what the notebooks say, and the README one page" python ci/readme.py --check
step "tests" python -m pytest -q -n "${DRIVELIT_WORKERS:-3}" --dist loadfile --no-loadscope-reorder "${tests[@]}"
step "every notebook runs" python ci/notebooks.py --workers "${DRIVELIT_WORKERS:-2}" --limit "${DRIVELIT_LIMIT:-1800}" "${slow[@]}"

printf '\n== summary\n'
printf '%s\n' "${summary[@]}"
printf '%d failed, %d minutes %d seconds\n' "$failures" $(((SECONDS - start) / 60)) $(((SECONDS - start) % 60))
[ -n "${DRIVELIT_SAMPLES:-}" ] || echo "DRIVELIT_SAMPLES is not set: the cells on recorded driving were skipped"
[ "$failures" = 0 ]
