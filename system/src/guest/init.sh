#!/bin/busybox sh
# The first program of the guest: sets up, runs /run.sh, powers off.
/bin/busybox --install -s /bin 2>/dev/null
export PATH=/bin HOME=/root
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
mount -t tmpfs tmp /tmp
exec </dev/console >/dev/console 2>&1
stty -echo 2>/dev/null

# The words of /run.sh: fail SENTENCE, must COMMAND.., mark NAME, await NAME.
fail() { echo "GUEST_FAIL $*"; sync; poweroff -f; }
must() { "$@" || fail "$* (status $?)"; }
mark() { echo "GUEST_MARK $*"; }
await() { mark "$@"; read -r _; }

# This busybox prefers its own, poorer ones.
blkdiscard() { /bin/blkdiscard "$@"; }
blockdev() { /bin/blockdev "$@"; }
fallocate() { /bin/fallocate "$@"; }

for module in /modules/*; do insmod "$module" || echo "cannot load $module"; done
DISK=/dev/vda
tries=0
# disk= and net= are words of the kernel's command line.
is_complete() {
    [ "$disk" = no ] || [ -b "$DISK" ] || return 1
    [ "$net" = no ] || [ -d /sys/class/net/eth0 ]
}
while ! is_complete && [ "$tries" -lt 300 ]; do
    sleep 0.1
    tries=$((tries + 1))
done
echo "GUEST_UP Linux $(uname -r), $(grep -c ^processor /proc/cpuinfo) CPUs," \
    "$(cut -d' ' -f1 /proc/uptime) s after start"
. /run.sh
sync
echo "GUEST_DONE"
poweroff -f
