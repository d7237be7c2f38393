#!/usr/bin/env bash
# Runs N ranks of a command on one of the MPI stacks, with the flags that root, few cores and CI need.
#
#   tests/mpirun.sh STACK N [--net] -- COMMAND ARGS...
#
#   STACK    openmpi   the Open MPI in $MPI_DIR/openmpi        (make .mpi/openmpi)
#            mpich     the MPICH in $MPI_DIR/mpich             (make .mpi/mpich)
#            system    what mpi4py loads by itself: the venv's MPI, else the system's
#   --net    one rank on each of the nodes hpcps-1 .. hpcps-N; to be run inside node hpcps-1: see tests/net/run.sh
#   COMMAND  `python` is the venv's
#
# Environment: TIMEOUT_S    seconds until the whole process group is ended, rc 124 (default 600)
#              VENV         virtual environment (default .venv in the project)
#              MPI_DIR      where the stacks lie (default .mpi in the project)
#              MPIRUN_FLAGS further flags for mpirun
#
# One venv serves every stack: MPI4PY_LIBMPI names the library, and the matching mpirun comes first on PATH. Both wheels
# find their own files from where the binary lies, so OPAL_PREFIX, LD_LIBRARY_PATH and the like are not needed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV:-$root/.venv}
mpi_dir=${MPI_DIR:-$root/.mpi}

die() {
    echo "mpirun.sh: $*" >&2
    exit 2
}

[ $# -ge 4 ] || die "usage: tests/mpirun.sh openmpi|mpich|system N [--net] -- COMMAND ARGS..."
stack=$1 ranks=$2 net=false
shift 2
if [ "$1" = --net ]; then net=true && shift; fi
[ "$1" = -- ] || die "cannot read the arguments: '$1' stands where '--' was expected"
shift

# A run started by a rank of another run must not take over that run's identity.
for name in $(compgen -e | grep -E '^(PMIX?_|PMI2_|HYD[A-Z]*_|OMPI_(COMM_WORLD|UNIVERSE|APP|FILE|FIRST|NUM|ARGV|COMMAND)|PRTE_LAUNCHED|MPI_LOCAL)' || true); do
    unset "$name"
done

export PATH="$venv/bin:$PATH"
case $stack in
    openmpi) library=libmpi.so.40 ;;
    mpich) library=libmpi.so.12 ;;
    system) library= ;;
    *) die "cannot use stack '$stack': not one of openmpi, mpich, system" ;;
esac
if [ -n "$library" ]; then
    [ -e "$mpi_dir/$stack/lib/$library" ] || die "cannot use stack '$stack': no $mpi_dir/$stack/lib/$library; run make .mpi/$stack"
    export PATH="$mpi_dir/$stack/bin:$PATH" MPI4PY_LIBMPI="$mpi_dir/$stack/lib/$library"
fi
mpirun=$(command -v mpirun) || die "cannot find mpirun; run make venv"
flavour=mpich
[[ "$("$mpirun" --version 2>&1)" != *"Open MPI"* ]] || flavour=openmpi

hosts=
if $net; then
    agent=$root/tests/net/agent.sh
    hosts=$(seq -s, -f "hpcps-%g" "$ranks")
    # the nodes share this machine's cores, which a rank alone on its node cannot know
    export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-1}
fi
flags=()
if [ "$flavour" = openmpi ]; then
    # Without --bind-to none every node's first rank is bound to core 0.
    flags+=(--bind-to none)
    [ "$(id -u)" != 0 ] || flags+=(--allow-run-as-root)
    if $net; then
        flags+=(--prtemca plm_ssh_agent "$agent" --host "$hosts" --map-by node:OVERSUBSCRIBE)
    else
        flags+=(--oversubscribe)
    fi
elif $net; then
    flags+=(-launcher ssh -launcher-exec "$agent" -hosts "$hosts")
fi
read -ra more <<<"${MPIRUN_FLAGS:-}"
flags+=("${more[@]}")

# Killed ranks leave their segments in /dev/shm, where they would fill the memory: remove those that appeared during
# this run and that no process maps.
segments() { compgen -G '/dev/shm/mpich_shm_*' || true; compgen -G '/dev/shm/sm_segment.*' || true; }
before=$(segments)
clean_segments() {
    local file
    for file in $(comm -13 <(sort <<<"$before") <(segments | sort)); do
        [ ! -O "$file" ] || grep -qsF "$file" /proc/[0-9]*/maps || rm -f "$file"
    done
}

# timeout puts itself and mpirun in a process group of their own and ends all of it; a signal to us is passed on.
limit_s=${TIMEOUT_S:-600}
timeout --kill-after=10 "$limit_s" "$mpirun" "${flags[@]}" -n "$ranks" "$@" </dev/null &
job=$!
stopped=false
trap 'stopped=true; kill -TERM "$job" 2>/dev/null || true' INT TERM HUP
SECONDS=0 rc=0
wait "$job" 2>/dev/null || rc=$?
if $stopped; then # that wait was cut short by the signal
    wait "$job" 2>/dev/null || true
    rc=130
elif [ "$rc" != 0 ] && [ "$SECONDS" -ge "$limit_s" ]; then
    echo "mpirun.sh: ended $ranks ranks on $stack: not done after $limit_s s" >&2
    rc=124
fi
[ "$rc" = 0 ] || clean_segments
exit "$rc"
