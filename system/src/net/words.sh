# The words of a guest with a network, in front of its script.
HOST=192.0.2.1
HOST6=2001:db8::1
ETH=${ETH:-eth0}

# network [NUMBER]: up, with the addresses that end in NUMBER (2 unless said).
network() {
    must ip link set lo up
    # Its address at once, without asking the link for duplicates.
    echo 0 > /proc/sys/net/ipv6/conf/$ETH/accept_dad
    must ip link set $ETH up
    must ip addr add 192.0.2.${1:-2}/24 dev $ETH
    must ip addr add 2001:db8::${1:-2}/64 dev $ETH
}

# pings ADDRESS [MORE..]: three echoes come back.
pings() {
    address=$1
    shift
    ping -c 3 -i 0.2 -W 3 "$@" $address > /tmp/ping 2>&1
    grep -q ' 0% packet loss' /tmp/ping || {
        cat /tmp/ping
        fail "ping $address $*"
    }
}

# floods ADDRESS: 5000 echoes, each as soon as an answer is there, between two marks; all come back.
# Debian's own ping, which must be among the guest's programs: busybox cannot flood.
floods() {
    await flood
    /bin/ping -f -q -c 5000 -W 3 $1 > /tmp/ping 2>&1
    grep -q ' 0% packet loss' /tmp/ping || {
        cat /tmp/ping
        fail "a flood of $1"
    }
    await flooded
}

# agrees ADDRESS KIB WHAT: that much random data arrives unchanged there, and here.
agrees() {
    head -c $(($2 * 1024)) /dev/urandom > /tmp/sent
    there=$(timeout 120 nc $1 7001 < /tmp/sent)
    here=$(sha256sum < /tmp/sent)
    [ "$there" = "$here" ] || fail "$3: sent to $1: $here, arrived there: $there"
    timeout 120 nc $1 7002 < /dev/null > /tmp/received
    there=$(timeout 120 nc $1 7003 < /dev/null | cut -d' ' -f1)
    here=$(sha256sum < /tmp/received | cut -d' ' -f1)
    [ "$there" = "$here" ] || fail "$3: sent by $1: $there, arrived here: $here"
}

# flow NAME ADDRESS MORE..: iperf3, run by $PIN if that is set; what the receiver got becomes a
# line "FLOW NAME ..".
flow() {
    name=$1
    address=$2
    shift 2
    timeout 120 $PIN iperf3 -c $address -f m "$@" > /tmp/iperf3 2>&1 || {
        cat /tmp/iperf3
        fail "iperf3 $name"
    }
    grep receiver /tmp/iperf3 | tail -n 1 | sed "s/^/FLOW $name /"
}

# is WHAT FOUND EXPECTED
is() { [ "$2" = "$3" ] || fail "$1 is ${2:-nothing}, not $3"; }

# becomes FILE VALUE: within half a minute.
becomes() {
    tries=0
    while [ "$(cat $1 2>/dev/null)" != "$2" ]; do
        [ $tries -lt 300 ] || fail "$1 is $(cat $1 2>&1), not $2"
        tries=$((tries + 1))
        sleep 0.1
    done
}

# received: frames that eth0 has received so far.
received() { cat /sys/class/net/eth0/statistics/rx_packets; }

# came COUNT: it has received so many since it had received $before, within half a minute.
came() {
    tries=0
    while [ $(($(received) - before)) -lt $1 ]; do
        [ $tries -lt 300 ] || return 1
        tries=$((tries + 1))
        sleep 0.1
    done
}
