#!/usr/bin/env bash
# Sets up, then checks style and types and runs the tests, on CPU and without network; or runs test equipment. Usage:
#   tests/run.sh                    all but the slow ones
#   tests/run.sh --all              the slow ones too
#   tests/run.sh --optimized        with the machine code that users run: optimized for CPUs, and slower to compile
#   tests/run.sh --newest           with the newest JAX, libtpu and other packages, in .venv-newest
#   tests/run.sh [--all] [--optimized] [--newest] ARGS…   ARGS go to pytest, such as tests/core -k slices
#   tests/run.sh lab COMMAND …      planted failures, soak, benchmarks, golden records, STATUS.md: tests/lab/
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
selection=(-m "not slow")
optimized=0
while [[ ${1:-} == --all || ${1:-} == --optimized || ${1:-} == --newest ]]; do
  case $1 in
    --all) selection=() ;;
    --optimized) optimized=1 ;;
    --newest) export RENGA_NEWEST=1 ;;
  esac
  shift
done
python=.venv/bin/python
[[ ${RENGA_NEWEST:-} != 1 ]] || python=.venv-newest/bin/python
launch/setup.sh --extra dev

# less optimized machine code, without fusion emitters, is compiled in a third of the time; programs for TPUs are the same
quick_flags="--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
[[ ${RENGA_NEWEST:-} == 1 ]] || quick_flags+=" --xla_cpu_use_fusion_emitters=false"  # later versions have no such flag

if [[ ${1:-} == lab ]]; then
  if ((optimized)) || ! ((${#selection[@]})); then
    echo "--all and --optimized are options of the tests, not of lab: leave them out" >&2
    exit 2
  fi
  export QUICK_XLA_FLAGS=$quick_flags  # of `lab without --quick`
  export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
  exec $python -m tests.lab "${@:2}"
fi

((optimized)) || export XLA_FLAGS="${XLA_FLAGS:-} $quick_flags"
export JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1
unset PYTHONDONTWRITEBYTECODE  # hundreds of processes of hosts and commands would each compile our modules
if [[ ${RENGA_NEWEST:-} == 1 ]]; then  # style and types are checked with the pinned packages
  $python --version
  $python -m pip list --disable-pip-version-check | grep -E '^(jax|jaxlib|libtpu|dm-haiku|optax|orbax-checkpoint|numpy) '
  echo "these were the newest when .venv-newest was made; delete it to install those of today"
else
  $python -m ruff format --check --quiet . || { echo "run: .venv/bin/ruff format" >&2 && exit 1; }
  $python -m ruff check --quiet .
  types=$(mktemp)
  trap 'rm -f "$types"' EXIT
  $python -m mypy --no-error-summary >"$types" 2>&1 &  # uses one core, beside the start of the tests
  mypy=$!
fi
status=0
# on two cores: the third process works while tests of the others wait for hosts
$python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "${selection[@]}" "$@" || status=$?
if [[ -n ${mypy:-} ]] && ! wait "$mypy"; then
  cat "$types" >&2
  status=1
fi
exit $status
