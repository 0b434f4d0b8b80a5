# The words of scripts in dom0, beside those of disk.sh.
node() { xenstore-read "$1" 2>/dev/null; }
node_is() { [ "$(node "$1")" = "$2" ]; }
gone() { ! kill -0 "$1" 2>/dev/null; }

# console NAME: what a domain says goes to /host/console-NAME, and it hears what is written to
# /tmp/NAME.tty. (`xl console` wants a terminal at its other end.)
console() {
    tty=/local/domain/$(xl domid "$1")/console/tty
    until_is xenstore-exists "$tty"
    tty=$(node "$tty")
    stty raw -echo <"$tty"
    ln -sf "$tty" "/tmp/$1.tty"
    cat "$tty" >>"/host/console-$1" &
}

# create NAME: starts the domain of /host/NAME.cfg.
create() {
    must xl create -p "/host/$1.cfg"
    console "$1"
    must xl unpause "$1"
}

# detach NAME DISK FOLDER: takes a disk back. The tool stack waits for ten seconds, which may be too
# short for an emulated guest on a busy host; what it asked for still happens.
detach() {
    xl block-detach "$1" "$2" && return
    until_is node_is "$3/state" 6
    must xl block-detach "$1" "$2"
}

# offer NAME KIND NUMBER FILE MODE: offers a domain a disk with nothing but nodes of xenstore.
offer() {
    domain=$(xl domid "$1") || fail "no domain $1"
    front=/local/domain/$domain/device/vbd/$3
    back=/local/domain/0/backend/$2/$domain/$3
    xenstore-write "$front" "" "$back" ""
    xenstore-chmod "$front" "n$domain" r0
    xenstore-chmod "$back" n0 "r$domain"
    xenstore-write "$back/frontend" "$front" "$back/frontend-id" "$domain" "$back/online" 1 \
        "$back/removable" 0 "$back/mode" "$5" "$back/params" "$4" "$back/type" phy \
        "$back/device-type" disk
    xenstore-write "$front/backend" "$back" "$front/backend-id" 0 "$front/virtual-device" "$3" \
        "$front/device-type" disk "$front/state" 1
    xenstore-write "$back/state" 1
}

# withdraw NAME KIND NUMBER: asks for such a disk back, and removes its nodes.
withdraw() {
    domain=$(xl domid "$1") || fail "no domain $1"
    front=/local/domain/$domain/device/vbd/$3
    back=/local/domain/0/backend/$2/$domain/$3
    xenstore-write "$back/online" 0 "$back/state" 5
    until_is node_is "$back/state" 6
    xenstore-rm "$front"
    xenstore-rm "$back"
}
