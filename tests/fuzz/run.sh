#!/usr/bin/env bash
# Builds the fuzz targets of the codecs with clang's address and undefined-behaviour sanitizers and runs them, side by
# side. `make fuzz` calls it.
#
# Environment: FUZZ_SECONDS  how long to run (default 10)
#              FUZZ_SEED     of libFuzzer's random numbers (default 1)
#              HPCPS_CLANG   the compiler (default: clang++, clang++-20 ... clang++-14)
#              VENV          virtual environment (default .venv in the project)
#
# What was found stays in build/fuzz: inputs that reach new code in *.corpus, those that fail in *-crash-* and the like.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
python=${VENV:-.venv}/bin/python
out=build/fuzz
seconds=${FUZZ_SECONDS:-10}

die() {
    echo "fuzz: $*" >&2
    exit 2
}

[[ $seconds =~ ^[1-9][0-9]*$ ]] ||
    die "cannot run for FUZZ_SECONDS='$seconds': need a whole number of seconds, at least 1; correct it"

# Prints why the compiler does not do; nothing where it does.
try_clang() {
    command -v "$1" >/dev/null || { echo "$1: there is none" && return; }
    local version
    version=$("$1" -dumpversion 2>/dev/null)
    [[ $("$1" --version 2>/dev/null) == *clang* && ${version%%.*} -ge 14 ]] ||
        { echo "$1: no clang from 14 on" && return; }
    echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' |
        "$1" -fsanitize=fuzzer,address,undefined -x c++ - -o "$out/trial" >"$out/trial.log" 2>&1 ||
        echo "$1: cannot link a fuzz target: $(head -1 "$out/trial.log")"
}

mkdir -p "$out" || exit 2
clang='' reasons=()
compilers=(clang++ clang++-{20,19,18,17,16,15,14})
[ -z "${HPCPS_CLANG:-}" ] || compilers=("$HPCPS_CLANG")
for each in "${compilers[@]}"; do
    reason=$(try_clang "$each")
    [ -n "$reason" ] || { clang=$each && break; }
    reasons+=("$reason")
done
if [ -z "$clang" ]; then
    printf 'fuzz: %s\n' "${reasons[@]}" >&2
    die "cannot build the fuzz targets: no clang++ from 14 on with libFuzzer; install it (Debian 12:" \
        "apt-get install clang-14 libclang-rt-14-dev) or name one with HPCPS_CLANG"
fi

# another compiler, other objects
[ "$(cat "$out/compiler" 2>/dev/null)" = "$("$clang" --version)" ] || rm -rf "$out"/*.o "$out"/ext "$out"/portable
"$clang" --version >"$out/compiler"
make --no-print-directory -s -j"$(nproc)" -f tests/sanitize/build.mk OUT="$out" CXX="$clang" fuzz ||
    die "cannot build the fuzz targets with $clang"
"$python" tests/fuzz/seeds.py "$out/seeds" || die "cannot write the seeds"

fuzz() { # fuzz TARGET
    mkdir -p "$out/$1.corpus"
    "$out/$1" -max_total_time="$seconds" -seed="${FUZZ_SEED:-1}" -max_len=4096 -timeout=20 -rss_limit_mb=2048 \
        -artifact_prefix="$out/$1-" -print_final_stats=1 "$out/$1.corpus" "$out/seeds/$1" >"$out/$1.log" 2>&1
}

targets=(decode encode)
declare -A pids
for target in "${targets[@]}"; do
    fuzz "$target" &
    pids[$target]=$!
done
failed=0
for target in "${targets[@]}"; do
    if wait "${pids[$target]}"; then
        inputs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$out/$target.log")
        echo "fuzz: $target: $inputs inputs, none failed"
    else
        failed=$((failed + 1))
        sed -n -E '/ERROR|CHECK failed|runtime error/,$p' "$out/$target.log" | head -40
        artifact=$(sed -n 's/.*Test unit written to //p' "$out/$target.log" | tail -1)
        echo "fuzz: $target FAILED; all of it: $out/$target.log; again: $out/$target ${artifact:-$out/seeds/$target}"
    fi
done
echo "fuzz: $((${#targets[@]} - failed)) passed, $failed failed, $seconds s with $clang"
[ "$failed" = 0 ]
