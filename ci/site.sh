#!/usr/bin/env bash
# The site from the committed notebooks, into _site/: bash ci/site.sh   Nothing is executed; a warning is an error.
#   DRIVELIT_SITE_VENV   where its tools are installed (default .venv-site): python 3.11 or newer and pip
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${DRIVELIT_SITE_VENV:-.venv-site}
tools='autoapi, myst_nb, sphinxcontrib.mermaid, sphinx_book_theme, sphinx_copybutton, sphinx_design'
if ! "$venv/bin/python" -c "import $tools" 2>/dev/null; then
  "${PYTHON:-python3}" -m venv --clear "$venv"
  "$venv/bin/pip" --disable-pip-version-check install -qq -r docs/site/requirements.txt
fi
"$venv/bin/python" ci/site_pages.py _site_pages
"$venv/bin/sphinx-build" -q -W --keep-going -j auto -b html _site_pages _site
echo "the site: _site/index.html"
