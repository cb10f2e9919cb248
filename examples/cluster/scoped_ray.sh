#!/bin/sh
# The ray command of an on-premise cluster: as Ray's own, with two differences.
# "ray stop", with which Ray's launcher ends a cluster, ends only the processes of this cluster: Ray's own would end
# every Ray of the machine that this user may end. And the other processes of a node end with its raylet, however it ends.
here="$HOME/raypar-cluster"
of_this_cluster="$here/tmp/session_"

end_cluster() {
    for signal in TERM KILL; do
        pkill "-$signal" -u "$(id -u)" -f "$of_this_cluster" || break
        for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do
            pgrep -u "$(id -u)" -f "$of_this_cluster" > /dev/null || break
            sleep 0.5
        done
    done
}

case "$1" in
stop)
    end_cluster
    ;;
watch)
    while pgrep -u "$(id -u)" -f "/raylet .*$of_this_cluster" > /dev/null; do
        sleep 2
    done
    end_cluster
    ;;
start)
    "$here/venv/bin/ray" "$@" || exit $?
    setsid sh "$0" watch > /dev/null 2>&1 < /dev/null &
    ;;
*)
    exec "$here/venv/bin/ray" "$@"
    ;;
esac
exit 0
