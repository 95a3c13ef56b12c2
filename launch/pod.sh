#!/usr/bin/env bash
# launch/pod.sh SLICE EXPERIMENT.gin [--gin "BINDING"]… [--run-dir DIR] [--steps N] [mode]
#
# Trains EXPERIMENT on a TPU slice or GPUs: as one of their hosts (here; SLICE `local` is this machine), on all hosts from
# a workstation (--tpu NAME), or on simulated hosts, which are processes on this machine (--simulate). See `launch/pod.sh --help`.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/run" pod "$@"
