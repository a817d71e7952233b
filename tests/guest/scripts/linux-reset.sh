# Controller resets while fio writes and verifies: every command is done or repeated, none is lost.
linux_up "$SERIAL"
disk=$(disk_of "$SERIAL" 1)
controller=$(controller_of "$SERIAL")
fio --name=reset --filename="$disk" --direct=1 --ioengine=libaio --rw=randwrite --bs=4k --iodepth=16 --numjobs=2 \
    --size=16M --offset_increment=16M --verify=crc32c --verify_fatal=1 --group_reporting \
    --output-format=terse >/tmp/fio.out &
fio=$!
resets=0
while kill -0 $fio 2>/dev/null && [ $resets -lt 8 ]; do
    usleep 400000
    nvme reset "/dev/$controller"
    wait_for 20 grep -q live "/sys/class/nvme/$controller/state"
    resets=$((resets + 1))
done
wait $fio
echo "$resets resets under load"
[ $resets -ge 3 ] || fail "fio was over after $resets resets"
linux_down
dmesg_clean 'resetting controller'
