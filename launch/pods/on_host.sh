#!/usr/bin/env bash
# What `launch/pod.sh --tpu NAME` runs on each host of the slice, over ssh: install, start, logs, status, stop,
# tensorboard. It lives in the workspace that was shipped, and keeps what it must remember in ~/.renga.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
state=$HOME/.renga
process=$state/process # process id and start time of the run, and its command line
run_log=$state/run.log
settle_seconds=2
stop_seconds=30 # to write a checkpoint in
host=$(hostname)

# Start time of process $1 in clock ticks: with the id it names a process for good.
start_time() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }

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

start() {
  local pid
  if pid=$(running_pid); then
    echo "$host: already running (process $pid)" >&2
    exit 1
  fi
  if [[ -f $state/hf_token ]]; then
    HF_TOKEN=$(<"$state/hf_token")
    export HF_TOKEN
    rm "$state/hf_token"
  fi
  cd "$root"
  [[ -f $run_log ]] && mv "$run_log" "$run_log.before"
  setsid nohup "$(python)" -m launch.pods.stamped "$run_log" "$host" launch/pod.sh "$@" </dev/null &>/dev/null &
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
    echo "$host: not running; last line of its log: $(tail -n 1 "$run_log" 2>/dev/null || echo none)"
  fi
}

stop() {
  local pid waited=0
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
  echo "$host: stopped process $pid"
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
    tensorboard) cd "$root" && exec .venv/bin/tensorboard --host 127.0.0.1 --port "$1" --logdir "$2" ;;
    *) echo "$host: unknown action $action" >&2 && exit 2 ;;
  esac
}

main "$@"
