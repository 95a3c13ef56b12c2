#!/usr/bin/env bash
# launch/pod.sh SLICE EXPERIMENT.gin [--gin "BINDING"]… [--run-dir DIR] [--steps N] [mode]
#
# Trains EXPERIMENT on the hosts of a TPU slice: this host of it, all of it from a workstation (--tpu NAME), or all of
# it as processes on this machine (--simulate). `launch/pod.sh --help` says the rest.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/run" pod "$@"
