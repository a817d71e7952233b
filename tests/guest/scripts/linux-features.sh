# What a driver may switch on: interrupt coalescing, a host memory buffer, the error log, asynchronous events.
linux_up "$SERIAL"
disk=$(disk_of "$SERIAL" 1)
controller=/dev/$(controller_of "$SERIAL")
dmesg | grep 'host memory buffer' || fail "Linux lent no host memory"
io() {
    fio --name=io --filename="$disk" --direct=1 --ioengine=libaio --rw=randwrite --bs=4k --iodepth=16 --numjobs=2 \
        --size=2M --offset_increment=2M --verify=crc32c --verify_fatal=1 --group_reporting \
        --output-format=terse >/tmp/fio.out
}
nvme set-feature "$controller" -f 8 --value 0x0a0f
nvme get-feature "$controller" -f 8
io
nvme set-feature "$controller" -f 8 --value 0
nvme set-feature "$controller" -f 6 --value 0
io
nvme set-feature "$controller" -f 6 --value 1
# A read beyond the end, past Linux's own check, is in the error log afterwards.
if nvme io-passthru "$disk" --opcode=2 --namespace-id=1 --cdw10=0xffffffff --data-len=4096 --read >/tmp/said 2>&1; then
    fail "a read beyond the end succeeded"
fi
nvme error-log "$controller" -e 1 >/tmp/log
cat /tmp/log
grep -q 'LBA Out of Range\|0x4080\|out of range' /tmp/log
# A temperature threshold that is passed raises an event; Linux asks for the next one and works on.
nvme set-feature "$controller" -f 4 --value 0x1
nvme smart-log "$controller" | grep critical_warning
io
linux_down
dmesg_clean
