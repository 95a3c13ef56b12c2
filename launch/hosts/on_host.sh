#!/usr/bin/env bash
# The actions that `launch/pod.sh --tpu NAME` runs on each host of the slice, over ssh: install, start, logs, status,
# state, stop, tensorboard. This file is part of the shipped workspace. It keeps its state in ~/.renga.
#
# A run with --restarts survives a reboot of its host: `start` adds an @reboot line to the user's crontab, which starts
# the same command again. The line is removed when the run ends for good, by itself or by `stop`.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
state=$HOME/.renga
process=$state/process # process id and start time of the run; its command line
run_directory=$state/run_directory
run_log=$state/run.log
ended=$state/ended     # exit code of the run, once it has ended
command=$state/command # shell commands that start the run again after a reboot, with the secrets
sent="TPU_MESH_CONFIG TPU_AXIS_NAMES RENGA_JOIN_SECONDS XLA_FLAGS LIBTPU_INIT_ARGS WANDB_MODE" # as in environment.py
secrets="HF_TOKEN WANDB_API_KEY RENGA_ALERT"
settle_seconds=2
stop_seconds=30 # allowed for writing a checkpoint
host=$(hostname)

# Prints the start time of process $1 in clock ticks, nothing if it is dead. Process ids are reused; with the start time
# they are unique.
start_time() { sed -n 's/.*) \([^ZX] .*\)/\1/p' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }

# Prints the process id of the run; fails if there is none.
running_pid() {
  local pid started
  # The start time is empty if the process ended before it could be recorded.
  [[ -f $process ]] && read -r pid started <"$process" && [[ -n $started && $(start_time "$pid") == "$started" ]] && echo "$pid"
}

# Prints the workspace's own Python if it is set up, otherwise python3.
python() { if [[ -x .venv/bin/python ]]; then echo .venv/bin/python; else echo python3; fi; }

# install [--extra NAME]…: unpacks the shipped workspace, and sets up with the extras of the workstation.
install_workspace() {
  local archive=$HOME/renga.tar.gz pid name
  if pid=$(running_pid); then
    echo "$host: a run is in progress (process $pid); stop it first: launch/pod.sh stop" >&2
    exit 1
  fi
  for name in $secrets; do rm -f "$state/$name"; done # of a start that failed before it read them
  cd "$root"
  find . -mindepth 1 -maxdepth 1 ! -name .venv ! -name .venv.lock ! -name runs -exec rm -rf {} +
  tar -xzf "$archive" -C "$root"
  rm "$archive"
  exec launch/setup.sh "$@"
}

# start DIRECTORY ARGUMENTS…: runs launch/pod.sh with the arguments and this run directory, which is recorded for
# `tensorboard`.
start() {
  local pid name directory=$1
  if pid=$(running_pid); then
    echo "$host: already running (process $pid)" >&2
    exit 1
  fi
  case $directory in
    *://* | "~"*) ;; # a bucket, or checked where the start was typed
    *)
      case $(cd "$root" && realpath -m -- "$directory") in # as the run, which is in $root, resolves it
        "$root"/runs | "$root"/runs/*) ;;
        "$root" | "$root"/*)
          echo "$host: the run directory $directory is in the shipped workspace, which each start replaces, except for runs/" >&2
          exit 1
          ;;
      esac
      ;;
  esac
  shift
  set -- "$@" --run-dir "$directory"
  echo "$directory" >"$run_directory"
  for name in $secrets; do take_secret "$name"; done
  if [[ " $* " == *" --restarts "* ]]; then survive_reboot "$@"; else forget; fi
  launch_detached "$@"
}

# Exports the secret $1 from its shipped file, and deletes the file.
take_secret() {
  local file=$state/$1
  [[ -f $file ]] || return 0
  export "$1=$(<"$file")"
  rm "$file"
}

# Adds the @reboot line, and writes the file that it runs: with the variables and secrets of this start, without which the
# other hosts would not let this one join. Only the user can read the file.
survive_reboot() {
  local name
  rm -f "$command"
  if ! command -v crontab >/dev/null; then
    echo "$host: there is no crontab, so a reboot of this host ends the run; if that happens, start it again" >&2
    return
  fi
  (umask 077 && : >"$command")
  for name in RENGA_JOIN_SECRET $sent $secrets ${!MEGASCALE_*}; do
    [[ -z ${!name:-} ]] || printf 'export %s=%q\n' "$name" "${!name}" >>"$command"
  done
  printf 'launch_detached' >>"$command"
  printf ' %q' "$@" >>"$command"
  echo >>"$command"
  write_crontab "@reboot bash $(printf %q "$root/launch/hosts/on_host.sh") after_reboot"
}

# Rewrites the user's crontab with $1 as our line; an empty $1 removes our line.
write_crontab() {
  local others
  others=$(crontab -l 2>/dev/null | grep -vF "launch/hosts/on_host.sh" || true)
  printf '%s' "${others:+$others$'\n'}${1:+$1$'\n'}" | crontab -
}

# Removes the @reboot line and the file that it runs.
forget() {
  rm -f "$command"
  if command -v crontab >/dev/null && crontab -l 2>/dev/null | grep -qF "launch/hosts/on_host.sh"; then
    write_crontab ""
  fi
}

# Runs launch/pod.sh and records its exit code. After a signal it waits for launch/pod.sh, which gets the signal too.
supervised() {
  local code=0 child
  trap : TERM INT HUP
  launch/pod.sh "$@" &
  child=$!
  while kill -0 "$child" 2>/dev/null; do
    code=0
    wait "$child" || code=$?
  done
  case $code in 130 | 143) ;; *) forget ;; esac # stopped by `stop`, which removes the line itself, or by a shutdown
  echo "$code" >"$ended"
  exit "$code"
}

launch_detached() {
  local pid
  cd "$root"
  rm -f "$ended"
  [[ -f $run_log ]] && mv "$run_log" "$run_log.before"
  setsid nohup "$(python)" -m launch.hosts.host_output "$run_log" "$host" bash launch/hosts/on_host.sh supervised "$@" \
    </dev/null &>/dev/null &
  pid=$!
  { echo "$pid $(start_time "$pid")" && echo "launch/pod.sh $*"; } >"$process"
  sleep "$settle_seconds"
  if ! running_pid >/dev/null && ! wait "$pid"; then
    echo "$host: the run ended at once. Its last lines:" >&2
    tail -n 20 "$run_log" >&2
    exit 1
  fi
  echo "$host: started process $pid, log $run_log"
}

logs() {
  local pid follow=()
  if pid=$(running_pid); then follow=(-F --pid="$pid"); fi
  tail -n 100 "${follow[@]}" "$run_log" # its lines begin with the name of the host
}

status() {
  local pid
  if pid=$(running_pid); then
    echo "$host: running, process $pid, $(ps -o etime= -p "$pid" | tr -d ' ') so far: $(tail -n 1 "$process")"
  else
    echo "$host: not running$(ending); last line of its log: $(tail -n 1 "$run_log" 2>/dev/null || echo none)"
  fi
}

# Prints how the run ended, if that is known.
ending() { [[ ! -f $ended ]] || echo ", ended with exit code $(<"$ended")"; }

# Prints, for programs: `running`, `ended CODE`, or `gone` if the run ended without an exit code, by a reboot.
state() {
  if running_pid >/dev/null; then
    echo running
  elif [[ -f $ended ]]; then
    echo "ended $(<"$ended")"
  else
    echo gone
  fi
}

stop() {
  local pid waited=0
  forget
  if ! pid=$(running_pid); then
    echo "$host: not running"
    return
  fi
  kill -TERM -- "-$pid"
  while ((waited < stop_seconds * 10)) && running_pid >/dev/null; do
    sleep 0.1
    waited=$((waited + 1))
  done
  kill -KILL -- "-$pid" 2>/dev/null || true
  echo 130 >"$ended" # as by Ctrl-C, which is never restarted
  echo "$host: stopped process $pid"
}

# Runs TensorBoard on port $1 over directory $2; default: the directory of the run that was started last.
open_tensorboard() {
  local directory=${2:-}
  if [[ -z $directory && ! -f $run_directory ]]; then
    echo "$host: no run was started here; name a directory: launch/pod.sh tensorboard --run-dir DIR" >&2
    exit 1
  fi
  directory=${directory:-$(<"$run_directory")}
  echo "$host: TensorBoard over $directory"
  cd "$root"
  exec .venv/bin/python -m launch tensorboard "$directory" --port "$1"
}

main() {
  local action=$1
  shift
  mkdir -p -m 700 "$state"
  case $action in
    install) install_workspace "$@" ;;
    start) start "$@" ;;
    logs) logs ;;
    status) status ;;
    stop) stop ;;
    state) state ;;
    supervised) supervised "$@" ;;
    after_reboot) [[ ! -f $command ]] || source "$command" ;;
    tensorboard) open_tensorboard "$@" ;;
    *) echo "$host: unknown action $action" >&2 && exit 2 ;;
  esac
}

main "$@"
