# A kernel that preempts itself: unbinds beside mappings, reads during resets, openers one right after the other, calls
# that wait for memory.
lender_up
take "$BDF"
grep -q '(full)' /sys/kernel/debug/sched/preempt 2>/dev/null || mount -t debugfs debugfs /sys/kernel/debug
grep -q '(full)' /sys/kernel/debug/sched/preempt || fail "the kernel does not preempt itself"
echo 100 >/sys/module/nvme_gpu/parameters/grace_ms
node-tests race "$BDF" 6
node-tests next-opener "$BDF" 6
node-tests resets "$BDF" 4
node-tests waits "$BDF"
leave "$BDF"
rmmod nvme_gpu
dmesg_clean
