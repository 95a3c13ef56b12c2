#!/usr/bin/env bash
# Creates .venv from requirements.txt, or with RENGA_NEWEST .venv-newest from the newest releases of what requirements.in
# names. If it is already current, this takes well under a second and prints nothing.
#
# The stamp file inside the environment (hash of the requirements, and Python's version) is removed before anything is
# changed and written last, so the next set-up completes an interrupted one. A lock file makes concurrent calls wait.
# A current environment is used without a lock, so users who cannot write to the workspace can use it, too.
# Usage: launch/setup.sh. Variables: launch/README.md (RENGA_PYTHON, RENGA_NEWEST, and pip's own such as PIP_INDEX_URL).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
name=.venv requirements=$root/requirements.txt supported=3.11-3.13
if [[ ${RENGA_NEWEST:-} == 1 ]]; then
  name=.venv-newest requirements=$root/requirements.in supported=3.12-3.13  # the newest JAX needs 3.12
fi
venv=$root/$name
stamp=$venv/renga.stamp
log=$venv.log
apt_timeout_seconds=300
progress_seconds=10

say() { echo "set-up: $*" >&2; }
fail() { say "$*"; exit 1; }

# Prints the full version of the Python $1; fails if it does not run or Renga does not support it.
supported_version() {
  "$1" -c 'import sys
v = sys.version_info
print("%d.%d.%d" % v[:3])
lowest, highest = (tuple(map(int, text.split("."))) for text in sys.argv[1].split("-"))
raise SystemExit(not lowest <= v[:2] <= highest)' "$supported" 2>/dev/null
}

wanted_stamp() { printf '%s python %s' "$(sha256sum <"$requirements" | cut -d' ' -f1)" "$1"; }

is_current() {
  [[ -f $stamp && -x $venv/bin/python ]] || return 1
  local version
  version=$(supported_version "$venv/bin/python") || return 1
  [[ $(<"$stamp") == "$(wanted_stamp "$version")" ]] || return 1
  [[ -z ${RENGA_PYTHON:-} ]] || [[ $(supported_version "$RENGA_PYTHON") == "$version" ]]
}

# Fails with the reason why the environment cannot be used as it is, if this user cannot change it.
require_writable() {
  local file why
  for file in "$root" "$venv" "$venv.lock" "$log"; do
    [[ ! -e $file || -w $file ]] || break
  done
  [[ -e $file && ! -w $file ]] || return 0
  if [[ ! -e $venv ]]; then
    why="there is no $name in $root"
  elif ! supported_version "$venv/bin/python" >/dev/null; then
    why="this user cannot run $venv/bin/python (set-up takes the Python that RENGA_PYTHON names; choose one that all users can run)"
  elif [[ ! -e $stamp ]]; then
    why="$venv is not complete"
  elif [[ $(<"$stamp") != "$(wanted_stamp "$(supported_version "$venv/bin/python")")" ]]; then
    why="$venv was made from other requirements or another Python than $requirements asks for now"
  else
    why="RENGA_PYTHON=$RENGA_PYTHON is not the Python of $venv"
  fi
  fail "$why, and this user cannot write to $file. A user who can write there has to run $root/launch/setup.sh once"
}

can_make_venv() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

# Prints the first supported Python on PATH that can make a virtual environment.
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
  say "no Python $supported with venv found: installing $package with apt-get"
  as_root "${install[@]}" >>"$log" 2>&1 && return
  as_root apt-get -o "DPkg::Lock::Timeout=$apt_timeout_seconds" -qq update >>"$log" 2>&1 || true
  as_root "${install[@]}" >>"$log" 2>&1 || { say "apt-get cannot install $package (see $log)"; return 1; }
}

# Installs Python 3.11 with uv and prints its path.
get_python_from_uv() {
  local uv
  uv=$(command -v uv || echo "$HOME/.local/bin/uv")
  if [[ ! -x $uv ]]; then
    say "no Python $supported with venv found: installing uv with pip to get one"
    python3 -m pip install --user --quiet uv >>"$log" 2>&1 || return 1
  fi
  [[ -x $uv ]] || return 1
  say "installing Python 3.11 with uv ($uv)"
  "$uv" python install 3.11 >>"$log" 2>&1 || { say "uv cannot install Python 3.11 (see $log)"; return 1; }
  "$uv" python find 3.11 2>>"$log"
}

choose_python() {
  if [[ -n ${RENGA_PYTHON:-} ]]; then
    supported_version "$RENGA_PYTHON" >/dev/null || fail "RENGA_PYTHON=$RENGA_PYTHON is not a Python $supported"
    can_make_venv "$RENGA_PYTHON" || fail "RENGA_PYTHON=$RENGA_PYTHON has no venv or no ensurepip"
    command -v "$RENGA_PYTHON"
  elif [[ $name == .venv-newest ]]; then
    find_python || fail "no Python $supported with venv found on PATH, which the newest JAX needs. Install one, such as" \
      "python3.13 and python3.13-venv, or set RENGA_PYTHON=/path/to/python3.13"
  elif ! find_python && ! { get_python_from_apt && find_python; } && ! get_python_from_uv; then
    fail "no Python $supported found (python3 is $(python3 --version 2>&1 || echo missing)), and neither apt-get nor uv" \
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

# Prints pip's progress every $progress_seconds, from its log; ends with this script. $1: the number of packages, if known.
report_progress() {
  local total=$1 found what
  SECONDS=0
  while sleep "$progress_seconds" &>/dev/null && kill -0 $$ 2>/dev/null; do
    found=$(grep -cE '^(Collecting|Requirement already satisfied)' "$log") || true
    what="$found ${total:+of $total }packages found and downloaded"
    ! grep -q '^Installing collected packages' "$log" || what="installing ${total:-the} packages"
    say "$what, $((SECONDS / 60)):$(printf %02d $((SECONDS % 60)))"
  done
}

install_requirements() {
  local total list=$requirements code=0
  total=$(grep -c '==' "$requirements")
  if [[ $name == .venv-newest ]]; then
    total='' list=$venv/requirements.txt
    sed -E 's/==[^ ;]+//; s/ *;[^#]*/  /' "$requirements" >"$list"  # without pins and conditions
  fi
  say "installing ${total:-the newest} packages into $name with Python $1 (once; a few minutes)"
  report_progress "$total" 9>&- &
  trap "kill $! 2>/dev/null || true" EXIT
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off -r "$list" \
    >>"$log" 2>&1 || code=$?
  kill $! 2>/dev/null || true
  if ((code)); then
    say "pip could not install ${list##*/}. Last lines of its output (all of it: $log):"
    tail -n 15 "$log" >&2
    local compiler=''
    [[ $name != .venv-newest ]] || compiler="a package that has no wheel for this Python (such as editdistance, of seqio) \
needs a C++ compiler; "
    fail "${compiler}if the package index cannot be reached, set PIP_INDEX_URL or a pip.conf; then run this again; it resumes"
  fi
}

main() {
  is_current && return
  require_writable
  exec 9>"$venv.lock"
  flock --nonblock 9 || { say "another set-up is running: waiting for it"; flock 9; }
  is_current && return
  trap 'say "interrupted; the same command continues"; exit 130' INT  # pip handles Ctrl-C itself, and ends regularly
  : >"$log"
  local python version
  python=$(choose_python)
  version=$(supported_version "$python") || fail "$python is not a Python $supported"
  make_venv "$python" "$version"
  install_requirements "$version"
  wanted_stamp "$version" >"$stamp.new"
  mv "$stamp.new" "$stamp"
  say "done: $venv"
}

main
