# The driver taken away and loaded again, idle and under load.

# More than 1,000 reads of the disk $1 have ended.
busy() {
    read -r _reads _ <"/sys/block/$(basename "$1")/stat"
    [ "$_reads" -gt 1000 ]
}

for round in 1 2 3 4 5; do
    linux_up "$SERIAL"
    dd if="$(disk_of "$SERIAL" 1)" of=/dev/null bs=64k count=16 iflag=direct 2>/dev/null
    linux_down
done
for round in 1 2 3; do
    linux_up "$SERIAL"
    disk=$(disk_of "$SERIAL" 1)
    function=$(basename "$(readlink "/sys/class/nvme/$(controller_of "$SERIAL")/device")")
    # An open disk holds the module: the function is taken from the driver first. fio may see errors then. It must not
    # make a regular file where the node was: the kernel then makes no node there again.
    fio --name=load --filename="$disk" --allow_file_create=0 --direct=1 --ioengine=libaio --rw=randrw --bs=4k \
        --iodepth=32 --time_based --runtime=30 --size=32M --output-format=terse >/tmp/fio.out 2>&1 &
    fio=$!
    wait_for 20 busy "$disk"
    kill -0 $fio || fail "fio is over before the driver goes"
    echo "$function" >/sys/bus/pci/drivers/nvme/unbind
    wait $fio || true
    wait_for 10 rmmod nvme
done
linux_up "$SERIAL"
fio --name=after --filename="$(disk_of "$SERIAL" 1)" --direct=1 --ioengine=libaio --rw=randwrite --bs=4k --iodepth=8 \
    --size=4M --verify=crc32c --verify_fatal=1 --output-format=terse >/tmp/fio.out
linux_down
dmesg_clean 'I/O error, dev nvme'
