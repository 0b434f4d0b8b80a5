# A day of manyring.service under systemd, as PID 1 of a container.
control=/run/manyring/control.sock
show() { systemctl show manyring -p "$1" --value; }
is() { test "$(show "$1")" = "$2"; }
load() { manyring-bench load blkio --seconds 0.1 --socket "/run/manyring/$1.sock"; }
# Asks again and again; whoever is refused, or finds no socket, says so.
ask_on() {
    while test ! -e /day/enough; do
        manyring stats --control $control 2>&1 >/dev/null | grep -E 'refused|No such file' >>/day/refused
    done
}
runs_again() { test "$(show NRestarts)" = "$1" && is ActiveState active; }
journal() { journalctl -q -b -u manyring -p "$1..$1" -o cat | grep -q "$2"; }

# A client is answered: not refused, however long the host lets it wait.
answered() {
    for try in 1 2 3 4 5 6; do
        said=$(manyring stats --control $control 2>&1 >/dev/null) && return 0
        case $said in *"no answer from the daemon within"*) echo "$said" >>/day/slow ;; *) break ;; esac
    done
    echo "$said"
    return 1
}

hundred_kills() {
    restarts=$(show NRestarts)
    for n in $(seq 100); do
        kill -9 "$(show MainPID)" && answered && until_ runs_again $((restarts + n)) || return 1
    done
}

must "unit verifies" sh -c '! systemd-analyze verify /etc/systemd/system/manyring.service 2>&1 | grep .'
must "exposure is at most 2.1" systemd-analyze security --offline=true --threshold=21 --no-pager /etc/systemd/system/manyring.service
must "start" systemctl start manyring
# With Type=notify, start returns when READY has come: nobody need wait for a socket.
must "sockets listen when start returns" test -S /run/manyring/a.sock -a -S /run/manyring/b.sock -a -S $control
must "status tells how many" is StatusText "serving 3 devices"
must "tap is made with CAP_NET_ADMIN alone" test -e /sys/class/net/mr0
capabilities=$(grep CapEff "/proc/$(show MainPID)/status" | cut -f 2)
must "no other capability" test "$capabilities" = 0000000000001000
must "guest is served" load a
must "priorities reach the journal" until_ journal 6 "INFO listening"
must "three disks and the control socket are kept" test "$(show NFileDescriptorStore)" -ge 4

sed -i '/name = "b"/,$d' /etc/manyring/manyring.toml
sed -i '$d' /etc/manyring/manyring.toml
must "reload" systemctl reload manyring
must "what was taken out goes" until_ test ! -e /run/manyring/b.sock
must "status after reload" until_ is StatusText "serving 1 devices"
must "what goes is not kept" until_ is NFileDescriptorStore 2

ask_on &
asker=$!
for n in 1 2 3 4 5; do
    kill -9 "$(show MainPID)"
    # Nobody runs for 300 ms: the client waits in the backlog.
    must "client of the gap $n" load a
    must "restart $n" until_ runs_again $n
done
# From here on the gap is as long as the unit makes it.
sed -i '/RestartSec/d' /etc/systemd/system/manyring.service.d/quick.conf
systemctl daemon-reload
must "a hundred kills, each followed by a client that is answered" hundred_kills
for n in 1 2 3; do
    must "restart by hand $n" systemctl restart manyring
    must "guest after restart by hand $n" load a
done
: >/day/enough
wait $asker
must "nobody was refused" test ! -s /day/refused

before=$(show NRestarts)
kill -STOP "$(show MainPID)"
must "watchdog restarts" until_ runs_again $((before + 1))
must "guest after the watchdog" load a

echo 'nonsense = 1' >>/etc/manyring/manyring.toml
must "a wrong configuration is refused at the reload" sh -c 'systemctl reload manyring; sleep 0.3'
must "and told" until_ sh -c 'systemctl show manyring -p StatusText --value | grep -q "reloading the configuration failed"'
must "and harms nobody" load a
sed -i '$d' /etc/manyring/manyring.toml
must "template" systemctl start manyring@two
must "template's guest" manyring-bench load blkio --seconds 0.1 --socket /run/manyring-two/c.sock
must "stop of the template" systemctl stop manyring@two
must "socket unit verifies" sh -c '! systemd-analyze verify /etc/systemd/system/manyring@three.socket 2>&1 | grep .'
must "socket unit" systemctl start manyring@three.socket
must "nobody runs before somebody asks" sh -c '! systemctl -q is-active manyring@three'
must "who asks starts the service" sh -c 'manyring stats --control /run/manyring-control/three.sock | grep -q d'
must "its guest" manyring-bench load blkio --seconds 0.1 --socket /run/manyring-three/d.sock
must "stop of the service" systemctl stop manyring@three
must "the control socket still listens" sh -c 'manyring stats --control /run/manyring-control/three.sock | grep -q d'
must "stop of both" systemctl stop manyring@three.socket manyring@three
must "the control socket goes" test ! -e /run/manyring-control/three.sock
must "stop" systemctl stop manyring
must "stopped well" is Result success
must "nothing is left" test ! -e /run/manyring -a ! -e /run/manyring-two -a ! -e /sys/class/net/mr0
journalctl -q -b -u manyring >/day/journal
