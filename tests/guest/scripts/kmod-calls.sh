# The data path makes no call of the module and no invalidation of the IOMMU's, and takes no fault for a command: eight
# times as many commands, as many of each.
lender_up
take "$BDF"
tracing=/sys/kernel/tracing
mount -t tracefs tracefs $tracing
ioctl=$tracing/events/syscalls/sys_enter_ioctl
flush=$tracing/events/intel_iommu/qi_submit
fault=$tracing/events/exceptions/page_fault_user
[ -d $flush ] || fail "this kernel does not trace what the IOMMU is asked to forget"
# How often the event $1 came.
hits() {
    sed -n 's/^ *Hits: //p' "$1/hist"
}
# The module's calls while a bench moves $1 bytes, each with how often it was made; other events are in $flushes and
# $faults.
calls() {
    echo 'hist:keys=cmd.hex' >$ioctl/trigger
    for event in $flush $fault; do
        echo 'hist:keys=common_pid' >$event/trigger
    done
    nvme-gpu bench --device "$DEVICE" --io-size "$1" --queues 2 --depth 16 >/tmp/bench
    grep 4ee $ioctl/hist | sort >/tmp/calls
    flushes=$(hits $flush)
    faults=$(hits $fault)
    echo '!hist:keys=cmd.hex' >$ioctl/trigger
    for event in $flush $fault; do
        echo '!hist:keys=common_pid' >$event/trigger
    done
    cat /tmp/bench
    echo "$1: $flushes invalidations, $faults faults"
}
# Once before, or the first one would also read the program from the initramfs.
calls 1MiB
calls 1MiB
cp /tmp/calls /tmp/few
few_flushes=$flushes
few_faults=$faults
calls 8MiB
[ -s /tmp/few ] || fail "no call of the module was seen"
cmp /tmp/few /tmp/calls || fail "calls of more commands: $(cat /tmp/calls)"
[ "$few_flushes" -gt 0 ] || fail "no invalidation was seen"
[ "$few_flushes" = "$flushes" ] || fail "invalidations of more commands: $flushes, not $few_flushes"
# A thread more or less that sleeps takes a few.
[ "$faults" -lt $((few_faults + 200)) ] || fail "faults of more commands: $faults, not $few_faults"
# Mappings are forgotten together when the last descriptor is closed.
node-tests many "$BDF" 4096 $flush
umount $tracing
leave "$BDF"
rmmod nvme_gpu
dmesg_clean
