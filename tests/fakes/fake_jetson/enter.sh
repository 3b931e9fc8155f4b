#!/bin/sh
# Runs inside a private mount namespace (unshare --mount). $1: the board's root; the rest: what to run on it.
set -eu
root=$1
shift
mount --rbind /proc "$root/realproc"
mount -t overlay fake-etc -o "lowerdir=$root/etc:/etc" /etc
mount -t overlay fake-lib -o "lowerdir=$root/var/lib:/var/lib" /var/lib
mount -t overlay fake-bin -o "lowerdir=$root/bin:/usr/bin" /usr/bin
mount --bind "$root/sys" /sys
mount --bind "$root/proc" /proc
exec "$@"
