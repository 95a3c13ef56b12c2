#!/usr/bin/env bash
# Writes requirements.txt, with every transitive version, from requirements.in. Usage: launch/lock.sh [uv pip compile flags]
#
# Versions in requirements.txt are kept if they satisfy requirements.in; `launch/lock.sh --upgrade` takes the newest. uv
# is installed into a temporary environment, and no index address is written to the file.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/launch/setup.sh"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$root/.venv/bin/python" -m venv "$scratch/uv"
"$scratch/uv/bin/python" -m pip install --disable-pip-version-check --quiet uv
cd "$root"
"$scratch/uv/bin/uv" pip compile requirements.in --universal --python-version 3.11 \
  --no-emit-index-url --no-emit-find-links --custom-compile-command "launch/lock.sh" --quiet -o requirements.txt "$@"
echo "requirements.txt: $(grep -c '==' requirements.txt) packages"
