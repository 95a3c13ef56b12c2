#!/usr/bin/env bash
# Writes requirements.txt, with every transitive version, from pyproject.toml. Usage: launch/lock.sh [uv pip compile flags]
#
# Versions in requirements.txt are kept if they satisfy pyproject.toml; `launch/lock.sh --upgrade` takes the newest, but
# not of JAX and libtpu, which are pinned here (WORKSPACE.md says why). No index address is written to the file.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/launch/setup.sh" --extra dev
cd "$root"
.venv/bin/python -m uv pip compile pyproject.toml --extra tpu --extra dev --universal --python-version 3.11 \
  --constraint /dev/stdin --no-emit-index-url --no-emit-find-links \
  --custom-compile-command "launch/lock.sh" --quiet -o requirements.txt "$@" <<<$'jax==0.10.2\nlibtpu==0.0.42.1'
echo "requirements.txt: $(grep -c '==' requirements.txt) packages"
