#!/usr/bin/env bash
# Builds the package with the address and undefined-behaviour sanitizers into build/asan and runs the tests of the
# kernels and codecs with it; arguments go to pytest. `make asan` calls it.
#
# Environment: VENV  virtual environment (default .venv in the project)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
root=$PWD
python=$(realpath -s "${VENV:-.venv}/bin/python")
out=$root/build/asan

die() {
    echo "asan: $*" >&2
    exit 2
}

# The whole package, so that it can stand before the one in place. The first fault is the end (-fno-sanitize-recover),
# and an overflow counts as one (Python's own flags have -fwrapv).
mkdir -p "$out" || exit 2
HPCPS_EXT=on HPCPS_CUDA=off HPCPS_SANITIZE=address,undefined \
    CXXFLAGS="-fno-wrapv -fno-sanitize-recover=all ${CXXFLAGS:-}" \
    "$python" setup.py -q build --build-lib "$out" --build-temp "$out/temp" >"$out/build.log" 2>&1 ||
    { cat "$out/build.log" && die "cannot build the package"; }

compiler=${CXX:-g++}
export LD_PRELOAD="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libubsan.so)"
# Python's own allocator would hide the ends of blocks; the interpreter leaks
export PYTHONMALLOC=malloc
export ASAN_OPTIONS="detect_leaks=0:${ASAN_OPTIONS:-}" UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1"
export PYTHONPATH=$out OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
cd "$out" || exit 2
built=$("$python" -c 'import hpcps._native as it; print(it.__file__)') || die "cannot import the package built in $out"
[[ $built == "$out"/* ]] || die "cannot test the package in $out: $built was imported"
# --capture=sys: a report goes to the process's own stderr and must not end with it
if "$python" -m pytest -q --capture=sys -c "$root/pyproject.toml" --rootdir "$root" -p no:cacheprovider "$@" \
    "$root"/tests/native/test_{checksum,kernels}.py "$root"/tests/native/test_codec_*.py; then
    echo "asan: passed"
else
    echo "asan: FAILED with $?"
    exit 1
fi
