# sh network.sh OWN OTHER..: the bridge br0, and a VXLAN between this host and the others.
set -e
own=$1
shift
ip link add br0 type bridge mcast_snooping 0
ip link set br0 up
ip link add vx42 type vxlan id 42 dstport 4789 local "$own"
ip link set vx42 master br0 up
# Broadcasts, and frames to addresses that are not learnt yet, go to each of the others.
for other in "$@"; do
    bridge fdb append 00:00:00:00:00:00 dev vx42 dst "$other"
done
