#!/usr/bin/env bash
# A lab of N nodes on one machine, as root. A node is a set of namespaces (network, host name, IPC, mounts): it has an
# address, /dev/shm, /etc/hosts and /sys/class/net of its own, so ranks on two nodes share no memory and meet over TCP
# alone. The nodes hang on a bridge in a namespace of its own: no packet can leave the lab.
#
#   netns.sh up N           make nodes hpcps-1 .. hpcps-N, after taking down what an earlier run left
#   netns.sh down           end every process of the lab and remove it; harmless when there is none
#   netns.sh exec NODE CMD ARGS...   run a command in a node, environment and working directory kept
#   netns.sh counters       one line a node: name, bytes sent, bytes received on its eth0
#
# Environment: HPCPS_NET_DIR     state: pids, hosts file, scratch files (default /run/hpcps-net)
#              HPCPS_NET_PREFIX  first three numbers of the addresses (default 10.213.77; node i is .i)
#
# All nodes live in one process namespace, so its end is the end of every process started in the lab, and of no other:
# `down` kills the one process that `up` started, known by pid and start time.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
state=${HPCPS_NET_DIR:-/run/hpcps-net}
prefix=${HPCPS_NET_PREFIX:-10.213.77}
switch=hpcps-switch
lifetime_s=7200 # a lab that everybody forgot ends by itself

die() {
    echo "netns.sh: $*" >&2
    exit 2
}

# Field 22 of /proc/PID/stat; the name in field 2 may hold blanks, so count from the last bracket.
start_time() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }

# Prints the pid of the running lab's keeper; fails when there is none.
keeper() {
    local pid started
    [ -e "$state/keeper" ] || return 1
    read -r pid started <"$state/keeper" || return 1
    [ "$(start_time "$pid")" = "$started" ] && echo "$pid"
}

add_node() {
    local i=$1 name=hpcps-$1
    ip netns add "$name"
    ip -n "$name" link add eth0 type veth peer name "port$i" netns "$switch"
    ip -n "$name" addr add "$prefix.$i/24" dev eth0
    ip -n "$name" link set lo up
    ip -n "$name" link set eth0 up
    ip -n "$switch" link set "port$i" master br0 up
}

up() {
    local n=$1 i
    { [[ $n =~ ^[1-9][0-9]{0,2}$ ]] && [ "$n" -le 200 ]; } || die "cannot make '$n' nodes; give a number from 1 to 200"
    down
    mkdir -p "$state/tmp"
    {
        echo "127.0.0.1 localhost"
        for i in $(seq "$n"); do echo "$prefix.$i hpcps-$i"; done
    } >"$state/hosts"
    ip netns add "$switch"
    ip -n "$switch" link add br0 type bridge
    ip -n "$switch" link set br0 up
    for i in $(seq "$n"); do add_node "$i"; done
    # fds 8 and 9 may be the caller's locks, which the lab must not keep
    setsid unshare --mount --pid --fork --kill-child --mount-proc \
        "$here/netns.sh" keep "$n" </dev/null >"$state/log" 2>&1 8>&- 9>&- &
    local pid=$!
    echo "$pid $(start_time "$pid")" >"$state/keeper"
    for i in $(seq 200); do
        [ ! -e "$state/ready" ] || return 0
        sleep 0.05
    done
    cat "$state/log" >&2
    down
    die "cannot start the lab: $n nodes were not ready after 10 s; the keeper's messages stand above"
}

# The first process of the lab's process namespace: starts a holder a node, then reaps orphans.
keep() {
    local i name
    for i in $(seq "$1"); do
        name=hpcps-$i
        nsenter --net="/run/netns/$name" unshare --uts --ipc --mount bash -c '
            set -e
            hostname "$1"
            mount --bind "$2/hosts" /etc/hosts
            mount -t tmpfs -o size=25% tmpfs /dev/shm
            mount -t sysfs sysfs /sys
            echo $$ >"$2/$1.new"
            mv "$2/$1.new" "$2/$1.pid"
            exec sleep "$3"' hold "$name" "$state" "$lifetime_s" &
    done
    for i in $(seq "$1"); do
        until [ -e "$state/hpcps-$i.pid" ]; do sleep 0.02; done
    done
    touch "$state/ready"
    wait
}

down() {
    local pid file
    if pid=$(keeper); then
        kill -KILL "$pid" # --kill-child takes its child, the kernel then takes the rest of the process namespace
        while [ "$(start_time "$pid")" != "" ] && grep -q '^State:[^Z]*$' "/proc/$pid/status" 2>/dev/null; do sleep 0.02; done
    fi
    for file in /run/netns/hpcps-[0-9]* "/run/netns/$switch"; do
        [ ! -e "$file" ] || ip netns del "${file##*/}"
    done
    rm -rf "$state"/{keeper,ready,log,hosts,tmp} "$state"/hpcps-*
    [ ! -d "$state" ] || rmdir "$state"
}

enter() {
    local node=$1 pid
    shift
    pid=$(keeper) || die "cannot enter node '$node': there is no lab; run netns.sh up N first"
    [ -e "$state/$node.pid" ] || die "cannot enter node '$node': no such node; see the nodes by netns.sh counters"
    exec nsenter --mount="/proc/$pid/ns/mnt" --pid="/proc/$pid/ns/pid_for_children" --wd="$PWD" \
        "$here/agent.sh" "$node" "$(printf '%q ' "$@")"
}

counters() {
    local file name
    keeper >/dev/null || die "cannot read counters: there is no lab; run netns.sh up N first"
    for file in "$state"/hpcps-*.pid; do
        name=${file##*/} name=${name%.pid}
        ip netns exec "$name" bash -c '
            cd /sys/class/net/eth0/statistics
            echo "$1 tx_bytes $(<tx_bytes) rx_bytes $(<rx_bytes)"' counters "$name"
    done | sort -t- -k2n
}

[ "$(id -u)" = 0 ] || die "cannot make namespaces: not root"
for tool in ip unshare nsenter; do
    command -v "$tool" >/dev/null || die "cannot find '$tool'; apt-get install iproute2 util-linux"
done
case ${1:-} in
    up) up "${2:-}" ;;
    keep) keep "$2" ;; # by `up` alone
    down) down ;;
    exec) enter "${@:2}" ;;
    counters) counters ;;
    *) die "usage: netns.sh up N | down | exec NODE CMD ARGS... | counters" ;;
esac
