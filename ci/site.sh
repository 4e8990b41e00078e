#!/usr/bin/env bash
# The site from the committed notebooks, into _site/: bash ci/site.sh   Nothing is executed; a warning is an error.
#   DRIVELIT_SITE_VENV   where its tools are installed (default .venv-site): python 3.11 or newer, pip and npm
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${DRIVELIT_SITE_VENV:-.venv-site}
tools='autoapi, myst_nb, sphinxcontrib.mermaid, sphinx_book_theme, sphinx_copybutton, sphinx_design'
if ! "$venv/bin/python" -c "import $tools" 2>/dev/null; then
  "${PYTHON:-python3}" -m venv --clear "$venv"
  "$venv/bin/pip" --disable-pip-version-check install -qq -r docs/site/requirements.txt
fi
"$venv/bin/python" ci/site_pages.py _site_pages
for package in mathjax-3.2.2 mermaid-11.12.1; do  # npm compares what it fetches with the registry's digest
  name=${package%-*}
  [ -f "$venv/$package.tgz" ] || npm pack --silent --pack-destination "$venv" "$name@${package#*-}" >/dev/null
  mkdir -p "$venv/$package" && tar -xzf "$venv/$package.tgz" -C "$venv/$package" --strip-components=1
done
mkdir -p _site_pages/static/mathjax/output/chtml/fonts _site_pages/static/mermaid/chunks
cp "$venv/mathjax-3.2.2/es5/tex-mml-chtml.js" _site_pages/static/mathjax/
cp -r "$venv/mathjax-3.2.2/es5/output/chtml/fonts/woff-v2" _site_pages/static/mathjax/output/chtml/fonts/
cp "$venv/mermaid-11.12.1/dist/mermaid.esm.min.mjs" _site_pages/static/mermaid/
cp -r "$venv/mermaid-11.12.1/dist/chunks/mermaid.esm.min" _site_pages/static/mermaid/chunks/
"$venv/bin/sphinx-build" -q -W --keep-going -j auto -b html _site_pages _site
echo "the site: _site/index.html"
