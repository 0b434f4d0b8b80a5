#!/bin/busybox sh
# The first program of dom0: brings the tool stack up, then runs one script after the other that the
# host puts into the folder they share.
/bin/busybox --install -s /bin 2>/dev/null
export PATH=/bin HOME=/root
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts
mount -t devpts devpts /dev/pts
mount -t tmpfs run /run
mount -t tmpfs tmp /tmp
mkdir -p /run/xen /run/lock /run/xenstored
# The tool stack's scripts lock through /dev/stdin, and wait for ever where it is missing.
ln -sf /proc/self/fd /dev/fd
ln -sf /proc/self/fd/0 /dev/stdin
ln -sf /proc/self/fd/1 /dev/stdout
ln -sf /proc/self/fd/2 /dev/stderr
hostname dom0
ip link set lo up
for module in /modules/*; do insmod "$module" || echo "cannot load $module"; done
mount -t xenfs xenfs /proc/xen
mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144 host /host
cp /host/manyring /tmp
"$XEN/bin/xenstored" --pid-file /run/xenstored.pid
until [ -S /run/xenstored/socket ]; do usleep 50000; done
"$XEN/bin/xen-init-dom0"
"$XEN/bin/xenconsoled" --pid-file=/run/xenconsoled.pid
echo "DOM0_UP $(cut -d' ' -f1 /proc/uptime)"
number=1
while :; do
    until [ -e "/host/run-$number" ]; do usleep 20000; done
    (. /words.sh; . "/host/run-$number") >"/host/said-$number" 2>&1 </dev/null
    echo $? >/host/status
    mv /host/status "/host/ended-$number"
    number=$((number + 1))
done
