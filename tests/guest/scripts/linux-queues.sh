# Linux's driver with other numbers of queues, depths and interrupts.
cycle() {
    linux_up "$SERIAL" "$@"
    disk=$(disk_of "$SERIAL" 1)
    fio --name=queues --filename="$disk" --direct=1 --ioengine=io_uring ${poll:-} --rw=randwrite --bs=4k \
        --iodepth=32 --numjobs=2 --size=2M --offset_increment=2M --verify=crc32c --verify_fatal=1 \
        --group_reporting --output-format=terse >/tmp/fio.out
    dmesg | grep 'default/read/poll queues' | tail -n 1
    linux_down
}
cpus=$(grep -c ^processor /proc/cpuinfo)
cycle io_queue_depth=2
cycle io_queue_depth=3
cycle io_queue_depth=1023
cycle max_host_mem_size_mb=0 io_queue_depth=4095
cycle write_queues="$cpus"
dmesg | grep -q "$cpus/[1-9][0-9]*/0 default/read/poll" || fail "no read queues of their own"
poll=--hipri
cycle poll_queues=1
dmesg | grep -q '/1 default/read/poll' || fail "no polled queue"
dmesg_clean
