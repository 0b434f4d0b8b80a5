# schemathesis against a daemon, in a network and with a /run of their own. The daemon is nobody:
# whatever path it is told to open, it can neither write nor make it outside of its folder.
# $1: the program, $2: schemathesis, $3: a folder, $4: cases for each operation, $5: seed
set -e
ip link set lo up
mount -t tmpfs -o mode=755 none /run
mkdir -p /run/manyring
chown 65534:65534 /run/manyring "$3"
chmod 711 "$3/.."
cd "$3"
setpriv --reuid=65534 --regid=65534 --clear-groups "$1" run --config manyring.toml 2>daemon.log &
daemon=$!
n=0
until test -S /run/manyring/control; do
    n=$((n + 1))
    test $n -lt 600 || { cat daemon.log; exit 1; }
    sleep 0.1
done
socat TCP-LISTEN:9876,bind=127.0.0.1,fork,reuseaddr UNIX-CONNECT:/run/manyring/control 2>socat.log &
socat=$!
"$2" --config-file schemathesis.toml run http://127.0.0.1:9876/v1/openapi.json --wait-for-schema 60 \
    --max-examples "$4" --seed "$5" --request-timeout 60 --no-color || failed=1
# Whatever it was asked, it serves on.
curl --silent --fail --max-time 60 --unix-socket /run/manyring/control http://x/v1/workers >/dev/null || failed=1
! grep panicked daemon.log || failed=1
kill "$daemon" "$socat"
test -z "$failed"
