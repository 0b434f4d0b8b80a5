# An operator's day with the package, in a root where no other one of it has been.
control=/run/manyring/control.sock
load() { manyring-bench load blkio --seconds 0.1 --socket /run/manyring/web.sock; }
runs_again() { test "$(systemctl show manyring -p NRestarts --value)" = 1 && systemctl -q is-active manyring; }
files() { find /etc /usr /var/lib/manyring /run -xdev -path /var/lib/dpkg -prune -o -iname '*manyring*' ! -name 'manyring-bench' -print 2>/dev/null; }

# The log of dpkg and the like are not what is looked for.
mkdir -p /var/log /var/lib/systemd
echo 'MANDATORY_MANPATH /usr/share/man' >/etc/manpath.config
must "nothing is here" sh -c 'test ! -e /usr/bin/manyring -a ! -e /etc/manyring'
must "install" dpkg --force-unsafe-io -i /day/manyring.deb
must "user of the service" grep -q '^manyring:' /etc/passwd
must "nothing runs before it is enabled" sh -c '! systemctl -q is-active manyring'
must "unit verifies" sh -c '! systemd-analyze verify manyring.service 2>&1 | grep .'
must "back-end programs are where the descriptors say" sh -c 'for kind in blk net; do
    $(sed -n "s/.*binary.: \"\(.*\)\"/\1/p" /usr/share/qemu/vhost-user/50-manyring-$kind.json) --print-capabilities || exit 1; done'
must "manual pages are found and read well" sh -c 'for page in manyring manyring-blk manyring-add-net; do
    man --warnings -E UTF-8 -l "$(man -w $page)" 2>&1 >/dev/null | grep -v -e "^man: " -e "macro file" | grep . && exit 1; man -l "$(man -w $page)" | grep -q "^SYNOPSIS" || exit 1; done'
must "commands are completed" bash -c '. /usr/share/bash-completion/completions/manyring; COMP_WORDS=(manyring re) COMP_CWORD=1
    _manyring manyring re manyring; test "${COMPREPLY[*]}" = "remove reload resize"'
must "enable and start" systemctl enable --now manyring
mkdir -p /var/lib/manyring
truncate -s 64M /var/lib/manyring/web.img
chown manyring /var/lib/manyring/web.img
must "a disk by the API" manyring add blk --control $control --name web --socket-path /run/manyring/web.sock --blk-file /var/lib/manyring/web.img
must "first I/O of a guest" load
must "stats name the disk" sh -c "manyring stats --control $control | grep -q web"
echo '# mine' >>/etc/manyring/manyring.toml
must "reload" systemctl reload manyring
kill -9 "$(systemctl show manyring -p MainPID --value)"
must "a guest after kill -9" load
must "restarted" until_ runs_again
before=$(systemctl show manyring -p MainPID --value)
must "upgrade" dpkg --force-unsafe-io -i /day/manyring.deb
must "the new program runs" sh -c "test \$(systemctl show manyring -p MainPID --value) != $before"
must "a guest after the upgrade, the disk was kept" load
must "upgrade keeps the configuration" grep -q '# mine' /etc/manyring/manyring.toml
process=$(systemctl show manyring -p MainPID --value)
must "remove" dpkg -r manyring
must "nothing runs" sh -c "test ! -e /proc/$process && ! systemctl -q is-active manyring"
must "configuration stays" test -e /etc/manyring/manyring.toml
must "purge" dpkg -P manyring
must "image of the guest stays" test -e /var/lib/manyring/web.img
rm /var/lib/manyring/web.img
rmdir /var/lib/manyring
files >/day/left
must "nothing is left" test ! -s /day/left
cat /day/left
