#!/usr/bin/env bash
# Builds the pages of docs/ as a site in docs/_build/html; a warning of Sphinx is an error.
# The first call makes docs/.venv from docs/requirements.txt. The pages of the API read the docstrings of the product,
# whose packages are in .venv (launch/setup.sh).
# Usage: docs/build.sh [options of sphinx-build]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/docs/.venv stamp=$root/docs/.venv/requirements.txt
"$root/launch/setup.sh"
if ! cmp --silent "$root/docs/requirements.txt" "$stamp"; then
  "$root/.venv/bin/python" -m venv --clear --without-pip "$venv"  # the Python may lack ensurepip
  "$root/.venv/bin/python" -m pip --python "$venv/bin/python" install --quiet --disable-pip-version-check \
    --requirement "$root/docs/requirements.txt"
  cp "$root/docs/requirements.txt" "$stamp"
fi
cd "$root"
JAX_PLATFORMS=cpu "$venv/bin/sphinx-build" --fail-on-warning --keep-going --builder html "$@" docs docs/_build/html
