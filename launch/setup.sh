#!/usr/bin/env bash
# Creates .venv with what runs need: the dependencies of pyproject.toml and its extra `tpu`, in the versions that
# requirements.txt has locked. With RENGA_NEWEST it creates .venv-newest, with the newest releases of the same packages.
# If the environment is already current, this takes well under a second and prints nothing.
#
# Usage: launch/setup.sh [--extra NAME]…   adds the packages of an extra of pyproject.toml, which later calls keep
# Variables: docs/reference/environment.md (RENGA_PYTHON, RENGA_NEWEST, and those of uv and pip, such as PIP_INDEX_URL).
#
# uv installs, or pip where uv cannot be had. The stamp file inside the environment (hash of the requirements, Python's
# version, extras) is removed before anything is changed and written last, so the next set-up completes an interrupted
# one. A lock file makes concurrent calls wait. A current environment is used without a lock, so users who cannot write
# to the workspace can use it, too.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
project=$root/pyproject.toml requirements=$root/requirements.txt
name=.venv supported=3.11-3.13
[[ ${RENGA_NEWEST:-} != 1 ]] || name=.venv-newest supported=3.12-3.13  # the newest JAX needs 3.12
venv=$root/$name
stamp=$venv/renga.stamp
kept=$venv/renga.extras
log=$venv.log
progress_seconds=10
extras=''
before=''  # extras of earlier calls

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

wanted_stamp() { printf '%s python %s extras %s' "$(cat "$project" "$requirements" | sha256sum | cut -d' ' -f1)" "$1" "$extras"; }

# Sets `extras` to those of earlier calls and of the arguments.
read_extras() {
  local known extra all=''
  known=$(sed -n '/^\[project.optional-dependencies\]/,/^\[b/s/^\([a-z0-9-]*\) = .*/\1/p' "$project")
  [[ ! -r $kept ]] || all=$(<"$kept")
  while (($#)); do
    [[ $1 == --extra && $# -gt 1 ]] || fail "expected launch/setup.sh [--extra NAME]…, got $1"
    grep -qx -e "$2" <<<"$known" || fail "no extra $2 in $project, which has" $known
    all+=" $2"
    shift 2
  done
  for extra in $known; do
    [[ " $all " != *" $extra "* ]] || extras+="${extras:+ }$extra"
  done
}

is_current() {
  [[ -f $stamp && -x $venv/bin/python ]] || return 1
  local version
  version=$(supported_version "$venv/bin/python") || return 1
  [[ $(<"$stamp") == "$(wanted_stamp "$version")" ]] || return 1
  [[ -z ${RENGA_PYTHON:-} ]] || [[ $(supported_version "$RENGA_PYTHON") == "$version" ]]
}

# Fails with the reason why the environment cannot be used as it is, if this user cannot change it.
require_writable() {
  local file why version
  for file in "$root" "$venv" "$venv.lock" "$log"; do
    [[ ! -e $file || -w $file ]] || break
  done
  [[ -e $file && ! -w $file ]] || return 0
  if [[ ! -e $venv ]]; then
    why="there is no $name in $root"
  elif ! version=$(supported_version "$venv/bin/python"); then
    why="this user cannot run $venv/bin/python (set-up takes the Python that RENGA_PYTHON names; choose one that all users can run)"
  elif [[ ! -e $stamp ]]; then
    why="$venv is not complete"
  elif [[ $(<"$stamp") != "$(wanted_stamp "$version")" ]]; then
    why="$venv was made from other requirements, other extras or another Python than are asked for now"
  else
    why="RENGA_PYTHON=$RENGA_PYTHON is not the Python of $venv"
  fi
  fail "$why, and this user cannot write to $file. A user who can write there has to run" \
    "$root/launch/setup.sh${extras:+ --extra ${extras// / --extra }} once"
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

# Installs the Debian or Ubuntu package that has ensurepip; it depends on its Python.
apt_installs_python() {
  command -v apt-get >/dev/null || return 1
  local root_by=() candidate version package=python${supported%-*}-venv
  [[ $(id -u) == 0 ]] || { sudo -n true 2>/dev/null || return 1; root_by=(sudo -n); }
  for candidate in python3 python3.13 python3.11 python3.12; do
    ! version=$(supported_version "$candidate") || package=python${version%.*}-venv
  done
  local apt=("${root_by[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -qq)
  say "no uv and no Python $supported with venv found: installing $package with apt-get"
  "${apt[@]}" -y install "$package" >>"$log" 2>&1 && return
  "${apt[@]}" update >>"$log" 2>&1 || true
  "${apt[@]}" -y install "$package" >>"$log" 2>&1 || { say "apt-get cannot install $package (see $log)"; return 1; }
}

# Prints where uv is; $1: another place to look.
find_uv() {
  local candidate
  for candidate in "$(command -v uv || true)" "${HOME:-}/.local/bin/uv" "$@"; do
    [[ ! -x $candidate ]] || { echo "$candidate"; return; }
  done
  return 1
}

# Makes an environment with uv, which downloads a Python if it finds none, but not 3.13, where a package has no wheel.
uv_makes_venv() {
  local uv
  uv=$(find_uv) && "$uv" venv --quiet --no-project --seed --python "${1:->=${supported%-*},<3.13}" "$venv" >>"$log" 2>&1
}

make_venv() {
  local python='' have
  if [[ -n ${RENGA_PYTHON:-} ]]; then
    supported_version "$RENGA_PYTHON" >/dev/null || fail "RENGA_PYTHON=$RENGA_PYTHON is not a Python $supported"
    find_uv >/dev/null || can_make_venv "$RENGA_PYTHON" ||
      fail "RENGA_PYTHON=$RENGA_PYTHON has no venv or no ensurepip, and there is no uv"
    python=$(command -v "$RENGA_PYTHON")
  fi
  rm -f "$stamp"
  if have=$(supported_version "$venv/bin/python") && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    [[ -n $python && $(supported_version "$python") != "$have" ]] || return 0
  fi
  rm -rf "$venv"
  ! uv_makes_venv "$python" || return 0
  if [[ -z $python ]] && ! python=$(find_python) && ! { apt_installs_python && python=$(find_python); }; then
    ! python3 -m pip install --user --quiet uv >>"$log" 2>&1 || ! uv_makes_venv '' || return 0
    fail "no Python $supported found (python3 is $(python3 --version 2>&1 || echo missing)), and neither apt-get nor uv" \
      "could install one (see $log). Install uv, or python${supported%-*}-venv, or set RENGA_PYTHON=/path/to/python${supported%-*}"
  fi
  rm -rf "$venv"
  "$python" -m venv "$venv" >>"$log" 2>&1 || fail "$python -m venv failed: $(tail -n 3 "$log")"
}

# Prints the packages of the extras $2… and the dependencies of pyproject.toml, one a line; if $1 is 1, without upper
# bounds.
packages() {
  "$venv/bin/python" -c 'import re, sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
extras = {"": project["dependencies"], **project["optional-dependencies"]}
for name in ("", *sys.argv[3:]):
    for package in extras[name]:
        within = re.match(r"renga\[(.*)\]", package)
        extras[name] += [p for n in within[1].split(",") for p in extras[n.strip()]] if within else []
    for package, *condition in (p.split(";") for p in extras[name] if not p.startswith("renga[")):
        print(";".join([re.sub(r",?<[^,]*", "", package) if sys.argv[2] == "1" else package, *condition]))' "$project" "$@"
}

# uv reads no settings of pip: gives it pip's index and certificates, unless it has its own.
as_pip() {
  local key value
  while IFS='=' read -r key value; do
    value=${value#\'} value=${value%\'}
    case $key in
      *.index-url) export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-${UV_INDEX_URL:-$value}}" ;;
      *.cert) export SSL_CERT_FILE="${SSL_CERT_FILE:-$value}" ;;
    esac
  done < <({ python3 -m pip config list || true; } 2>/dev/null)
}

# Shows the last line of the log: on a terminal in one line that changes, otherwise now and then. It ends with this script.
report_progress() {
  local line
  SECONDS=0
  [[ ! -t 2 ]] || progress_seconds=1
  while sleep "$progress_seconds" &>/dev/null && kill -0 $$ 2>/dev/null; do
    line="$((SECONDS / 60)):$(printf %02d $((SECONDS % 60))) $(tail -n 1 "$log" | cut -c 1-70)"
    if [[ -t 2 ]]; then printf '\r\033[Kset-up: %s' "$line" >&2; else say "$line"; fi
  done
}

# Installs packages with uv, or with pip if uv fails. Uses `pip` and `pins` of its caller.
install() {
  local uv
  { uv=$(find_uv "$venv/bin/uv") && "$uv" pip install --python "$venv/bin/python" "$@" "${pins[@]}" >>"$log" 2>&1; } ||
    "${pip[@]}" "$@" "${pins[@]}" >>"$log" 2>&1
}

install_packages() {
  local list=$venv/packages.txt pins=(-c "$requirements") pip
  [[ $name == .venv ]] || pins=()
  packages "${RENGA_NEWEST:-0}" tpu $extras >"$list"
  pip=("$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off)
  say "installing into $name with Python $1 (once; a minute or two)"
  report_progress 9>&- &
  trap "kill $! 2>/dev/null || true" EXIT
  find_uv "$venv/bin/uv" >/dev/null || "${pip[@]}" --quiet uv "${pins[@]}" >>"$log" 2>&1 || true
  # On 3.13 seqio comes without editdistance (pyproject.toml), which pip cannot leave out of what it resolves.
  if ! install -r "$list" || { [[ $1 == 3.13.* ]] && ! install --no-deps seqio; }; then
    echo "$before" >"$kept"  # an extra that cannot be installed keeps no later call from its work
    say "neither uv nor pip could install the packages. Last lines of their output (all of it: $log):"
    tail -n 15 "$log" >&2
    fail "if the package index cannot be reached, set PIP_INDEX_URL or a pip.conf; then run this again; it resumes"
  fi
  echo 'importing' >>"$log"
  # uv leaves modules uncompiled: hosts that start together, and users who cannot write here, would each compile them.
  env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -c 'import gin, haiku, optax, orbax.checkpoint' >>"$log" 2>&1 ||
    fail "the packages are installed, but cannot be imported: $(tail -n 3 "$log")"
  kill $! 2>/dev/null || true
  [[ ! -t 2 ]] || printf '\r\033[K' >&2
}

main() {
  read_extras "$@"
  is_current && return
  require_writable
  exec 9>"$venv.lock"
  flock --nonblock 9 || { say "another set-up is running: waiting for it"; flock 9; }
  extras=''
  read_extras "$@"
  is_current && return
  trap 'say "interrupted; the same command continues"; exit 130' INT  # uv and pip handle Ctrl-C themselves, and end
  : >"$log"
  local version
  [[ ! -r $kept ]] || before=$(<"$kept")
  as_pip
  make_venv
  version=$(supported_version "$venv/bin/python")
  echo "$extras" >"$kept"
  install_packages "$version"
  wanted_stamp "$version" >"$stamp.new"
  mv "$stamp.new" "$stamp"
  say "done: $venv"
}

main "$@"
