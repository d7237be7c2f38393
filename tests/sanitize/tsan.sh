#!/usr/bin/env bash
# Builds the driver of threads.cpp with the thread sanitizer and runs it; then without, forking more. `make tsan` calls
# it.
#
# Environment: TSAN_SECONDS  how long each of the two runs (default 10)
#              CXX           the compiler (default g++)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
compiler=${CXX:-g++}
seconds=${TSAN_SECONDS:-10}

build() { # build FOLDER FLAG
    mkdir -p "$1" && make --no-print-directory -s -j"$(nproc)" -f tests/sanitize/build.mk OUT="$1" CXX="$compiler" \
        SANITIZE="$2" threads
}
build build/tsan -fsanitize=thread && build build/tsan/plain '' || exit 2

# Some kernels place memory at random where the sanitizer keeps its own; a container may forbid to change that.
command=(build/tsan/threads "$seconds")
if setarch -R true 2>/dev/null; then command=(setarch -R "${command[@]}"); fi
# after a fork the child starts threads: the sanitizer would refuse that
export TSAN_OPTIONS="die_after_fork=0:halt_on_error=1:second_deadlock_stack=1:${TSAN_OPTIONS:-}"
limit=$((seconds + 120))
if timeout "$limit" "${command[@]}" && timeout "$limit" build/tsan/plain/threads "$seconds" busy; then
    echo "tsan: passed"
else
    echo "tsan: FAILED with $?"
    exit 1
fi
