# An operator's day with the package, in a root where no other one of it has been.
control=/run/manyring/control.sock
load() { manyring-bench load blkio --seconds 0.1 --socket /run/manyring/d1.sock; }
ask() {
    path=$1
    shift
    curl --silent --fail --max-time 60 --unix-socket $control "$@" "http://x$path"
}
names() { ask /v1/devices | grep -o '"name":"[a-z0-9]*","kind"' | sort; }
# What a change may not leave behind where it was refused: names, the generation, descriptors.
state() { names; ask /v1/config | grep -c '"f[0-9]'; ask /v1/config -o /dev/null -D - | grep -i '^etag'; }
descriptors() { ls "/proc/$(systemctl show manyring -p MainPID --value)/fd" | wc -l; }
# What the refused change had opened is closed beside the answer to it.
none_is_left() { test "$(descriptors)" -le "$open"; }
disk() { manyring add blk --control $control --name "d$1" --socket-path "/run/manyring/d$1.sock" --memory 1M; }
network() { manyring add net --control $control --name "n$1" --socket-path "/run/manyring/n$1.sock" --tap "mr$1" --bridge br0; }
# The guest marks a word that it is told, once what it wrote after that is on its disk and it has
# reached the host over its network.
marked() { grep -q -a "^GUEST_MARK $1" /day/console; }
works() { echo "$1" >/day/keys && until_ marked "$1"; }
# A boot of an emulated machine takes up to a minute and a half where others are busy.
boots() {
    patience=900
    # What is typed before Linux reads its console is lost.
    until_ grep -q -a '^GUEST_UP' /day/console && works first &&
        echo "from dpkg -i to the first I/O of the guest: $(($(clock) - installed)) ms" >/day/took
}
has_booted() { patience=900 && until_ test -s /day/took && patience=; }
ended() { grep -q -a '^GUEST_DONE' /day/console && ! kill -0 "$guest"; }
clock() { date +%s%3N; }
# A line of the guide, as it stands there, where the package lies.
guide() { (cd /day && sh -ec "$(sed -n "$1p" guide)"); }
# Fifty disks more in the file; the 37th is what $1 says.
fifty() {
    sed '/^# fifty/,$d' /etc/manyring/manyring.toml
    echo '# fifty'
    for n in $(seq 50); do
        serves="null = '1M'"
        test "$n" != 37 || serves=$1
        printf "[[blk]]\nname = 'f%s'\nsocket_path = '/run/manyring/f%s.sock'\n%s\n" "$n" "$n" "$serves"
    done
}
rewrite() { fifty "$1" >/day/fifty && cat /day/fifty >/etc/manyring/manyring.toml; }
# q is pressed when the disk has been seen.
seen() { until_ grep -a -q web /day/top; printf q; }
one_frame() {
    : >/day/top
    seen | TERM=xterm script -qfec "stty rows 24 cols 100; manyring top --control $control" /day/top >/dev/null
    grep -a -q web /day/top
}
runs_again() { test "$(systemctl show manyring -p NRestarts --value)" = 1 && systemctl -q is-active manyring; }
files() { find /etc /usr /var/lib/manyring /run -xdev -path /var/lib/dpkg -prune -o -iname '*manyring*' ! -name 'manyring-bench' -print 2>/dev/null; }

# The log of dpkg and the like are not what is looked for.
mkdir -p /var/log /var/lib/systemd
echo 'MANDATORY_MANPATH /usr/share/man' >/etc/manpath.config
mkfifo /day/keys
ip link add br0 type bridge
ip addr add 192.0.2.1/24 dev br0
ip link set br0 up
must "nothing is here" sh -c 'test ! -e /usr/bin/manyring -a ! -e /etc/manyring'
installed=$(clock)
must "install as the guide says" guide 1
must "user of the service" grep -q '^manyring:' /etc/passwd
must "nothing runs before it is enabled" sh -c '! systemctl -q is-active manyring'
must "enable and start" guide 2
must "make a file for a disk" guide 3
must "give it to the service" guide 4
must "a disk by the API" guide 5
must "what the VMM is to be told" guide 6
must "a network" network 1
# The guest has this disk and this network until it ends, before the package is removed.
sh /day/guest/run <>/day/keys >/day/console 2>&1 &
guest=$!
boots &
must "unit verifies" sh -c '! systemd-analyze verify manyring.service 2>&1 | grep .'
must "back-end programs are where the descriptors say" sh -c 'for kind in blk net; do
    $(sed -n "s/.*binary.: \"\(.*\)\"/\1/p" /usr/share/qemu/vhost-user/50-manyring-$kind.json) --print-capabilities || exit 1; done'
must "manual pages are found and read well" sh -c 'for page in manyring manyring-blk manyring-add-net; do
    man --warnings -E UTF-8 -l "$(man -w $page)" 2>&1 >/dev/null | grep -v -e "^man: " -e "macro file" | grep . && exit 1; man -l "$(man -w $page)" | grep -q "^SYNOPSIS" || exit 1; done'
must "commands are completed" bash -c '. /usr/share/bash-completion/completions/manyring; COMP_WORDS=(manyring re) COMP_CWORD=1
    _manyring manyring re manyring; test "${COMPREPLY[*]}" = "remove reload resize"'
for n in 1 2 3 4 5 6 7 8 9 10; do must "disk $n" disk $n; done
must "another network" network 2
must "their interfaces are there" test -e /sys/class/net/mr1 -a -e /sys/class/net/mr2
must "another client is served" load
must "first I/O of the guest" has_booted
must "stats name its disk" sh -c "manyring stats --control $control | grep -q web"
must "metrics know its disk, and one that nobody uses" sh -c "curl -s --unix-socket $control http://x/metrics >/day/metrics
    grep -q 'manyring_device_connected{device=.web.} 1' /day/metrics && grep -q 'manyring_device_connected{device=.d3.} 0' /day/metrics"
must "top draws a frame" one_frame
must "a limit is changed" manyring set --control $control web limit.read_iops=500 limit.write_bps=20M
must "the limit is shown" sh -c "curl -s --unix-socket $control http://x/v1/config | grep -q '\"read_iops\":500'"
must "the guest works under the limit" works limited
state >/day/before
open=$(descriptors)
must "fifty changes are written, the 37th cannot be opened" rewrite "file = '/var/lib/manyring/none.img'"
must "the reload is refused" sh -c "! manyring reload --control $control"
state >/day/after
must "nothing has changed" cmp /day/before /day/after
must "no descriptor is left" until_ none_is_left
must "the 37th can be opened" rewrite "null = '2M'"
must "fifty changes at once" manyring reload --control $control
must "the fifty are there" test "$(names | wc -l)" = 63
sed -i '/^# fifty/,$d' /etc/manyring/manyring.toml
must "fifty go at once" manyring reload --control $control
must "thirteen are left" test "$(names | wc -l)" = 13
echo '# mine' >>/etc/manyring/manyring.toml
must "reload" systemctl reload manyring
must "the guest has seen nothing of it" works reloaded
kill -9 "$(systemctl show manyring -p MainPID --value)"
must "a client after kill -9" load
must "restarted" until_ runs_again
must "the guest goes on after kill -9" works killed
before=$(systemctl show manyring -p MainPID --value)
must "upgrade" dpkg --force-unsafe-io -i /day/manyring_0.1.0_amd64.deb
must "the new program runs" sh -c "test \$(systemctl show manyring -p MainPID --value) != $before"
must "the guest goes on after the upgrade" works upgraded
must "all thirteen were kept" test "$(names | wc -l)" = 13
must "upgrade keeps the configuration" grep -q '# mine' /etc/manyring/manyring.toml
process=$(systemctl show manyring -p MainPID --value)
echo end >/day/keys
must "the guest ends without an error" until_ ended
must "remove" dpkg -r manyring
must "nothing runs" sh -c "test ! -e /proc/$process && ! systemctl -q is-active manyring"
must "no interface is left" test ! -e /sys/class/net/mr1 -a ! -e /sys/class/net/mr2
must "configuration stays" test -e /etc/manyring/manyring.toml
must "purge" dpkg -P manyring
must "image of the guest stays" test -e /var/lib/manyring/web.img
rm /var/lib/manyring/web.img
rmdir /var/lib/manyring
files >/day/left
must "nothing is left" test ! -s /day/left
cat /day/left /day/took
