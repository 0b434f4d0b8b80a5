# Words of the scripts in a container. Each line of the output that
# begins with "must" is a promise; what follows it must be "yes".
must() {
    what=$1
    shift
    if "$@" >/day/said 2>&1; then echo "must $what: yes"; else echo "must $what: no: $(tail -c 300 /day/said)"; fi
}
# Tries again for half a minute, or for the tenths of a second in $patience.
until_() { n=0; until "$@" >/dev/null 2>&1; do n=$((n + 1)); test $n -lt ${patience:-300} || return 1; sleep 0.1; done; }
