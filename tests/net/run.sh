#!/usr/bin/env bash
# Runs N ranks, each on a node of its own in a fresh lab (netns.sh), and takes the lab down again whatever happens.
# As root.
#
#   tests/net/run.sh STACK N [--min-bytes B] -- COMMAND ARGS...
#
#   STACK          openmpi | mpich | system, as for tests/mpirun.sh
#   --min-bytes B  fail unless every node both sent and received at least B bytes on its eth0 (default 1)
#
# Environment: that of tests/mpirun.sh and of netns.sh; TIMEOUT_S (default 600) ends the run with rc 124.
# At the end it prints one line a node: its bytes sent and received. One lab at a time: a second run waits for the first.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export HPCPS_NET_DIR=${HPCPS_NET_DIR:-/run/hpcps-net}
usage="usage: tests/net/run.sh STACK N [--min-bytes B] -- COMMAND ARGS..."
[ $# -ge 4 ] || { echo "run.sh: $usage" >&2; exit 2; }
stack=$1 ranks=$2 min_bytes=1
shift 2
if [ "$1" = --min-bytes ]; then min_bytes=$2 && shift 2; fi
[ "$1" = -- ] || { echo "run.sh: $usage" >&2; exit 2; }
shift
timeout_s=${TIMEOUT_S:-600}

exec 9>"$HPCPS_NET_DIR.lock"
flock --wait 900 9 || { echo "run.sh: cannot make a lab: another one is in use; see $HPCPS_NET_DIR.lock" >&2; exit 2; }
trap '"$here/netns.sh" down' EXIT
trap 'exit 130' INT TERM HUP
"$here/netns.sh" up "$ranks"

# The ranks' own timeout is the inner one. The outer one is for a launcher that does not end: then `down` ends it.
rc=0
TMPDIR="$HPCPS_NET_DIR/tmp" TIMEOUT_S="$timeout_s" timeout --kill-after=5 $((timeout_s + 30)) \
    "$here/netns.sh" exec hpcps-1 "$here/../mpirun.sh" "$stack" "$ranks" --net -- "$@" 9>&- &
wait $! || rc=$?

"$here/netns.sh" counters >"$HPCPS_NET_DIR/tmp/counters"
while read -r node _ sent _ received; do
    printf '%s: %s bytes sent, %s bytes received (%s)\n' "$node" "$sent" "$received" "$stack"
    if [ "$rc" = 0 ] && { [ "$sent" -lt "$min_bytes" ] || [ "$received" -lt "$min_bytes" ]; }; then
        echo "run.sh: cannot accept the run: $node moved less than $min_bytes bytes, so ranks met elsewhere than over TCP" >&2
        rc=3
    fi
done <"$HPCPS_NET_DIR/tmp/counters"
exit "$rc"
