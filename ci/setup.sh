#!/usr/bin/env bash
# A virtual environment with every pinned version, on a bare machine: python 3.11 or newer with pip, or uv. Where there
# is no uv, pip brings it: it installs four times as fast. Both read the versions of ci/constraints.txt.
#   DRIVELIT_VENV   where (default .venv)      DRIVELIT_TORCH   another torch, e.g. "torch==2.13.0" for CUDA
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${DRIVELIT_VENV:-.venv}

python=""
for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
  if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$candidate; break; fi
done
uv=$(command -v uv || true)
[ -n "$python" ] || [ -z "$uv" ] || python=3.11  # uv brings one
[ -n "$python" ] || { echo "ci/setup.sh: needs python 3.11 or newer (set PYTHON=...)" >&2; exit 1; }

if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  if [ -n "$uv" ]; then
    "$uv" venv -q --seed --clear --python "$python" "$venv"
  elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then  # Debian keeps venv in a package of its own
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || { echo "ci/setup.sh: $python has no venv module; install python3-venv" >&2; exit 1; }
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    apt-get update -qq
    apt-get install -y -qq "python$version-venv" || apt-get install -y -qq python3-venv
  fi
  [ -n "$uv" ] || "$python" -m venv --clear "$venv"
fi

# Byte code is made when a module is first imported, as after uv: most modules of torch never are.
pip=("$venv/bin/python" -m pip --disable-pip-version-check install -qq --no-compile -c ci/constraints.txt)
[ -n "$uv" ] || ! "${pip[@]}" uv 2>/dev/null || uv=$venv/bin/uv
# What pip alone was told, uv does not read: an index of one's own, a folder of wheels, a certificate.
told=$("$venv/bin/python" -m pip config list)
of_pip() { sed -n "s/^[^=]*\.$1='\(.*\)'$/\1/p" <<<"$told" | head -n 1 | sed 's/\\n/ /g'; }  # its environment first
export UV_INDEX_URL=${UV_INDEX_URL:-$(of_pip index-url)} UV_EXTRA_INDEX_URL=${UV_EXTRA_INDEX_URL:-$(of_pip extra-index-url)}
export UV_FIND_LINKS=${UV_FIND_LINKS:-$(of_pip find-links | tr ' ' ,)} SSL_CERT_FILE=${SSL_CERT_FILE:-$(of_pip cert)}
for name in UV_INDEX_URL UV_EXTRA_INDEX_URL UV_FIND_LINKS SSL_CERT_FILE; do [ -n "${!name}" ] || unset "$name"; done
install() {  # where uv finds nothing, pip goes on
  [ -n "$uv" ] &&
    "$uv" pip install -q --index-strategy unsafe-best-match --python "$venv/bin/python" -c ci/constraints.txt "$@" ||
    "${pip[@]}" "$@"
}
torch=$(sed -n 's/^\(torch==[0-9.]*\).*/\1/p' ci/constraints.txt)
[ "$(uname -s)" = Linux ] && torch="$torch+cpu"
torch=${DRIVELIT_TORCH:-$torch}
# The CPU build first, so that nothing below pulls in CUDA: from the index that pip knows, or from PyTorch's own.
install "$torch" 2>/dev/null || install --extra-index-url https://download.pytorch.org/whl/cpu "$torch"
install -e '.[dev]'
# The nuScenes devkit names older numpy and shapely than ours as its own; what it needs of them is unchanged.
install --no-deps nuscenes-devkit descartes
# py123d would bring a viewer, a notebook server and another build of OpenCV over ours.
install --no-deps py123d
"$venv/bin/python" -c 'import torch, transformers, trl; print(f"ready: torch {torch.__version__}, transformers {transformers.__version__}, trl {trl.__version__}")'
