#!/usr/bin/env bash
# Stands in for ssh inside the lab of netns.sh: runs a command line in a node's namespaces, environment and working
# directory kept. mpirun, itself in a node, starts its remote daemons with it:
#   Open MPI 5:  mpirun --prtemca plm_ssh_agent agent.sh --host hpcps-1:1,hpcps-2:1 ...
#   MPICH:       mpirun -launcher ssh -launcher-exec agent.sh -hosts hpcps-1,hpcps-2 ...
#
#   agent.sh [-OPTION ...] NODE COMMAND...     ssh's options without a value, ignored; COMMAND is joined for a shell
#
# Environment: HPCPS_NET_DIR as for netns.sh. From outside the lab use `netns.sh exec NODE ...`.
set -euo pipefail
state=${HPCPS_NET_DIR:-/run/hpcps-net}
while [ "${1#-}" != "$1" ]; do shift; done
node=$1
shift
if ! holder=$(cat "$state/$node.pid" 2>/dev/null); then
    echo "agent.sh: cannot enter node '$node': no such node in $state; run netns.sh up N first" >&2
    exit 2
fi
exec nsenter --target "$holder" --net --uts --ipc --mount bash -c "cd $(printf %q "$PWD") && $*"
