#!/usr/bin/env bash
# The explorers in a real browser: set up, then ci/browser.py. Chromium is the machine's own, or playwright fetches it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -n "${DRIVELIT_NO_SETUP:-}" ] || bash ci/setup.sh
python=${DRIVELIT_VENV:-.venv}/bin/python
"$python" -m pip --disable-pip-version-check install -qq -c ci/constraints.txt playwright
for name in chromium chromium-browser google-chrome; do command -v "$name" >/dev/null && found=yes; done
[ -n "${found:-}" ] || "$python" -m playwright install --with-deps chromium
exec "$python" ci/browser.py "$@"
