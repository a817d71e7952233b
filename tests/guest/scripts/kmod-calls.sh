# The data path makes no call of the module: eight times as many commands, as many calls.
lender_up
take "$BDF"
tracing=/sys/kernel/tracing
mount -t tracefs tracefs $tracing
ioctl=$tracing/events/syscalls/sys_enter_ioctl
# The module's calls while a bench moves $1 bytes, each with how often it was made.
calls() {
    echo 'hist:keys=cmd.hex' >$ioctl/trigger
    nvme-gpu bench --device "$DEVICE" --io-size "$1" --queues 2 --depth 16 >/tmp/bench
    grep 4ee $ioctl/hist | sort
    echo '!hist:keys=cmd.hex' >$ioctl/trigger
}
few=$(calls 1MiB)
grep commands /tmp/bench
many=$(calls 8MiB)
grep commands /tmp/bench
echo "$few"
[ -n "$few" ] || fail "no call of the module was seen"
[ "$few" = "$many" ] || fail "calls of more commands: $many"
umount $tracing
leave "$BDF"
rmmod nvme_gpu
dmesg_clean
