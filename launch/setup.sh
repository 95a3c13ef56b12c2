#!/usr/bin/env bash
# Creates .venv from requirements.txt. If it is already current, this takes well under a second and prints nothing.
#
# The stamp file inside .venv (hash of requirements.txt, and Python's version) is removed before anything is changed and
# written last, so the next set-up completes an interrupted one. A lock file makes concurrent calls wait.
# Usage: launch/setup.sh. Variables: launch/README.md (RENGA_PYTHON, and pip's own such as PIP_INDEX_URL).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
requirements=$root/requirements.txt
stamp=$venv/renga.stamp
log=$root/.venv.log
apt_timeout_seconds=300
progress_seconds=10

say() { echo "set-up: $*" >&2; }
fail() { say "$*"; exit 1; }

# Prints the full version of the Python $1; fails if it does not run or Renga does not support it.
supported_version() {
  "$1" -c 'import sys
v = sys.version_info
print("%d.%d.%d" % v[:3])
raise SystemExit(not (3, 11) <= v[:2] <= (3, 13))' 2>/dev/null
}

wanted_stamp() { printf '%s python %s' "$(sha256sum <"$requirements" | cut -d' ' -f1)" "$1"; }

is_current() {
  [[ -f $stamp && -x $venv/bin/python ]] || return 1
  local version
  version=$(supported_version "$venv/bin/python") || return 1
  [[ $(<"$stamp") == "$(wanted_stamp "$version")" ]] || return 1
  [[ -z ${RENGA_PYTHON:-} ]] || [[ $(supported_version "$RENGA_PYTHON") == "$version" ]]
}

can_make_venv() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

# Prints the first Python on PATH that is 3.11-3.13 and can make a virtual environment.
find_python() {
  local candidate
  for candidate in python3.12 python3.11 python3.13 python3; do
    if supported_version "$candidate" >/dev/null && can_make_venv "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

as_root() {
  if [[ $(id -u) == 0 ]]; then "$@"; else sudo -n "$@"; fi
}

# Prints the Debian or Ubuntu package that has ensurepip; it depends on its Python.
apt_package() {
  local candidate version
  for candidate in python3.12 python3.11 python3.13 python3; do
    if version=$(supported_version "$candidate"); then
      echo "python${version%.*}-venv"
      return
    fi
  done
  echo python3.11-venv
}

get_python_from_apt() {
  command -v apt-get >/dev/null || return 1
  [[ $(id -u) == 0 ]] || sudo -n true 2>/dev/null || return 1
  local package install
  package=$(apt_package)
  install=(env DEBIAN_FRONTEND=noninteractive apt-get -o "DPkg::Lock::Timeout=$apt_timeout_seconds" -qq -y install "$package")
  say "no Python 3.11-3.13 with venv found: installing $package with apt-get"
  as_root "${install[@]}" >>"$log" 2>&1 && return
  as_root apt-get -o "DPkg::Lock::Timeout=$apt_timeout_seconds" -qq update >>"$log" 2>&1 || true
  as_root "${install[@]}" >>"$log" 2>&1 || { say "apt-get cannot install $package (see $log)"; return 1; }
}

# Installs Python 3.11 with uv and prints its path.
get_python_from_uv() {
  local uv
  uv=$(command -v uv || echo "$HOME/.local/bin/uv")
  if [[ ! -x $uv ]]; then
    say "no Python 3.11-3.13 with venv found: installing uv with pip to get one"
    python3 -m pip install --user --quiet uv >>"$log" 2>&1 || return 1
  fi
  [[ -x $uv ]] || return 1
  say "installing Python 3.11 with uv ($uv)"
  "$uv" python install 3.11 >>"$log" 2>&1 || { say "uv cannot install Python 3.11 (see $log)"; return 1; }
  "$uv" python find 3.11 2>>"$log"
}

choose_python() {
  if [[ -n ${RENGA_PYTHON:-} ]]; then
    supported_version "$RENGA_PYTHON" >/dev/null || fail "RENGA_PYTHON=$RENGA_PYTHON is not a Python 3.11-3.13"
    can_make_venv "$RENGA_PYTHON" || fail "RENGA_PYTHON=$RENGA_PYTHON has no venv or no ensurepip"
    command -v "$RENGA_PYTHON"
  elif ! find_python && ! { get_python_from_apt && find_python; } && ! get_python_from_uv; then
    fail "no Python 3.11-3.13 found (python3 is $(python3 --version 2>&1 || echo missing)), and neither apt-get nor uv" \
      "could install one. Install python3.11 and python3.11-venv, or set RENGA_PYTHON=/path/to/python3.11"
  fi
}

make_venv() {
  local python=$1 version=$2
  rm -f "$stamp"
  if [[ $(supported_version "$venv/bin/python") != "$version" ]] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    rm -rf "$venv"
    "$python" -m venv "$venv" >>"$log" 2>&1 || fail "$python -m venv failed: $(tail -n 3 "$log")"
  fi
}

# Prints pip's progress with $1 packages every $progress_seconds, from its log; ends with this script.
report_progress() {
  local total=$1 found what
  SECONDS=0
  while sleep "$progress_seconds" &>/dev/null && kill -0 $$ 2>/dev/null; do
    found=$(grep -cE '^(Collecting|Requirement already satisfied)' "$log") || true
    what="$found of $total packages found and downloaded"
    ! grep -q '^Installing collected packages' "$log" || what="installing $total packages"
    say "$what, $((SECONDS / 60)):$(printf %02d $((SECONDS % 60)))"
  done
}

install_requirements() {
  local total code=0
  total=$(grep -c '==' "$requirements")
  say "installing $total packages into .venv with Python $1 (once; a few minutes)"
  report_progress "$total" 9>&- &
  trap "kill $! 2>/dev/null || true" EXIT
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off -r "$requirements" \
    >>"$log" 2>&1 || code=$?
  kill $! 2>/dev/null || true
  if ((code)); then
    say "pip could not install requirements.txt. Last lines of its output (all of it: $log):"
    tail -n 15 "$log" >&2
    fail "if the package index cannot be reached, set PIP_INDEX_URL or a pip.conf; then run this again; it resumes"
  fi
}

main() {
  is_current && return
  exec 9>"$root/.venv.lock"
  flock --nonblock 9 || { say "another set-up is running: waiting for it"; flock 9; }
  is_current && return
  : >"$log"
  local python version
  python=$(choose_python)
  version=$(supported_version "$python") || fail "$python is not a Python 3.11-3.13"
  make_venv "$python" "$version"
  install_requirements "$version"
  wanted_stamp "$version" >"$stamp.new"
  mv "$stamp.new" "$stamp"
  say "done: $venv"
}

main
