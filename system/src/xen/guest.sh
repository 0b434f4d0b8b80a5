# The script of a Xen guest, behind the words of disk.sh: runs one script after the other that it
# hears on its console.

# verifies DISK MORE..: fio writes and checks what it wrote.
verifies() {
    file=$1
    shift
    fio --name=verify --filename="$file" --direct=1 --ioengine=libaio --rw=randwrite \
        --bsrange=512-128k --iodepth=16 --verify=crc32c --verify_fatal=1 --do_verify=1 \
        --minimal "$@" >/tmp/fio 2>&1 && return 0
    cat /tmp/fio
    fail "fio on $file"
}

mkdir -p /mnt
: >/tmp/script
while read -r line; do
    case $line in
    "RUN "*)
        number=${line#RUN }
        echo "RIG_BEGIN $number"
        (. /tmp/script) </dev/null 2>&1
        status=$?
        echo
        echo "RIG_END $number $status"
        : >/tmp/script
        ;;
    *) echo "$line" >>/tmp/script ;;
    esac
done
