# Words of dom0 and of its guests.
fail() { echo "FAIL $*"; exit 1; }
must() { "$@" || fail "$* (status $?)"; }
is() { [ "$2" = "$3" ] || fail "$1: $2, expected $3"; }
absent() { ! "$@"; }

# until_is COMMAND..: waits until it succeeds.
until_is() {
    tries=0
    until "$@" >/dev/null 2>&1; do
        [ "$tries" -lt 1200 ] || fail "not within two minutes: $*"
        tries=$((tries + 1))
        usleep 100000
    done
}

# Debian's, which know more than those of busybox.
blockdev() { /bin/blockdev "$@"; }

forget() { blockdev --flushbufs "$1"; echo 3 >/proc/sys/vm/drop_caches; }
sum() { dd if="$1" bs=64k count="$2" skip="$3" 2>/dev/null | md5sum; }

# pattern DISK: random bytes, written and read back.
pattern() {
    head -c 4194304 /dev/urandom >/tmp/pattern
    must dd if=/tmp/pattern of="$1" bs=64k seek=48 conv=fsync,notrunc 2>/dev/null
    forget "$1"
    is "the bytes of $1" "$(sum "$1" 64 48)" "$(md5sum </tmp/pattern)"
    rm /tmp/pattern
}
