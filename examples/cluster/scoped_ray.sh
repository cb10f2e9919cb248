#!/bin/sh
# The ray command of an on-premise cluster: as Ray's own, but "ray stop", with which Ray's launcher ends a cluster, ends
# the processes of this cluster alone. Ray's own would end every Ray of the machine that this user may end.
here="$HOME/raypar-cluster"
if [ "$1" != stop ]; then
    exec "$here/venv/bin/ray" "$@"
fi
of_this_cluster="$here/tmp/session_"
for signal in TERM KILL; do
    pkill "-$signal" -u "$(id -u)" -f "$of_this_cluster" || break
    for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do
        pgrep -u "$(id -u)" -f "$of_this_cluster" > /dev/null || break
        sleep 0.5
    done
done
exit 0
