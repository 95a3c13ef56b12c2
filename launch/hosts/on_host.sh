#!/usr/bin/env bash
# What `launch/pod.sh --tpu NAME` runs on each host of the slice, over ssh: install, start, logs, status, state,
# stop, tensorboard. It lives in the workspace that was shipped, and keeps what it must remember in ~/.renga.
#
# A run with --restarts survives a reboot of its host: `start` adds a line `@reboot` to the user's crontab, which starts
# the same command again, and whatever ends the run for good (its own end, or `stop`) takes the line out.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
state=$HOME/.renga
process=$state/process # process id and start time of the run, and its command line
run_directory=$state/run_directory
run_log=$state/run.log
ended=$state/ended     # exit code of the run, once it ended
command=$state/command # what started it, for after a reboot
settle_seconds=2
stop_seconds=30 # to write a checkpoint in
host=$(hostname)

# Start time of process $1 in clock ticks, nothing once it is dead: with the id it names a process for good.
start_time() { sed -n 's/.*) \([^ZX] .*\)/\1/p' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }

running_pid() {
  local pid started
  # An empty start time is that of a process that ended before it could be noted.
  [[ -f $process ]] && read -r pid started <"$process" && [[ -n $started && $(start_time "$pid") == "$started" ]] && echo "$pid"
}

# That of the workspace, where it was set up.
python() { if [[ -x .venv/bin/python ]]; then echo .venv/bin/python; else echo python3; fi; }

install_workspace() {
  local archive=$HOME/renga.tar.gz pid
  if pid=$(running_pid); then
    echo "$host: a run is in progress (process $pid); stop it first: launch/pod.sh stop" >&2
    exit 1
  fi
  cd "$root"
  find . -mindepth 1 -maxdepth 1 ! -name .venv ! -name .venv.lock ! -name runs -exec rm -rf {} +
  tar -xzf "$archive" -C "$root"
  rm "$archive"
  exec launch/setup.sh
}

# start DIRECTORY ARGUMENTS…: launch/pod.sh with the arguments and this run directory, which `tensorboard` needs too.
start() {
  local pid directory=$1
  if pid=$(running_pid); then
    echo "$host: already running (process $pid)" >&2
    exit 1
  fi
  shift
  set -- "$@" --run-dir "$directory"
  echo "$directory" >"$run_directory"
  take_secret HF_TOKEN
  take_secret RENGA_ALERT
  if [[ " $* " == *" --restarts "* ]]; then survive_reboot "$@"; else forget; fi
  launch_detached "$@"
}

# The secret $1 from the file that was shipped, which goes.
take_secret() {
  local file=$state/$1
  [[ -f $file ]] || return 0
  export "$1=$(<"$file")"
  rm "$file"
}

survive_reboot() {
  local name
  : >"$command"
  for name in TPU_MESH_CONFIG TPU_AXIS_NAMES ${!MEGASCALE_*}; do
    [[ -z ${!name:-} ]] || printf 'export %s=%q\n' "$name" "${!name}" >>"$command"
  done
  printf 'launch_detached' >>"$command"
  printf ' %q' "$@" >>"$command"
  echo >>"$command"
  if ! command -v crontab >/dev/null; then
    echo "$host: no crontab here, so a reboot of this host ends the run; start it again yourself" >&2
    return
  fi
  write_crontab "@reboot bash $(printf %q "$root/launch/hosts/on_host.sh") after_reboot"
}

# The user's crontab, with line $1 for ours, or without one.
write_crontab() {
  local others
  others=$(crontab -l 2>/dev/null | grep -vF "launch/hosts/on_host.sh" || true)
  printf '%s' "${others:+$others$'\n'}${1:+$1$'\n'}" | crontab -
}

forget() {
  rm -f "$command"
  if command -v crontab >/dev/null && crontab -l 2>/dev/null | grep -qF "launch/hosts/on_host.sh"; then
    write_crontab ""
  fi
}

# The run, with its exit code left where the next command finds it. Told to stop, it waits for the run to.
supervised() {
  local code=0 child
  trap : TERM INT HUP
  launch/pod.sh "$@" &
  child=$!
  while kill -0 "$child" 2>/dev/null; do
    code=0
    wait "$child" || code=$?
  done
  case $code in 130 | 143) ;; *) forget ;; esac # stopped: by a person, who says so, or by a machine that goes down
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
  tail -n 100 "${follow[@]}" "$run_log" # whose lines say which host it is
}

status() {
  local pid
  if pid=$(running_pid); then
    echo "$host: running, process $pid, $(ps -o etime= -p "$pid" | tr -d ' ') so far: $(tail -n 1 "$process")"
  else
    echo "$host: not running$(ending); last line of its log: $(tail -n 1 "$run_log" 2>/dev/null || echo none)"
  fi
}

# What is known of how the run ended.
ending() { [[ ! -f $ended ]] || echo ", ended with exit code $(<"$ended")"; }

# For a program: `running`, `ended CODE`, or `gone` where the machine that it ran on went down with it.
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
  echo 130 >"$ended" # by a person: nobody starts it again
  echo "$host: stopped process $pid"
}

# TensorBoard at port $1 over $2, or over the directory of the run that was started last.
open_tensorboard() {
  local directory=${2:-}
  if [[ -z $directory && ! -f $run_directory ]]; then
    echo "$host: no run was started here: say which with launch/pod.sh tensorboard --run-dir DIR" >&2
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
    install) install_workspace ;;
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
