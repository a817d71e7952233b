# A MAP for which kernel memory runs out half-way, at each step of it, or whose memory has something else in its middle.
lender_up
take "$BDF"
[ -e /sys/fs/cgroup/cgroup.controllers ] || mount -t cgroup2 none /sys/fs/cgroup
echo +memory >/sys/fs/cgroup/cgroup.subtree_control
echo 5 >/proc/sys/vm/nr_hugepages
[ "$(cat /proc/sys/vm/nr_hugepages)" = 5 ] || fail "there are no huge pages"
# The kernel says each time at length that there is no memory; the port that its log goes to is slow.
echo 0 >/proc/sys/vm/oom_dump_tasks
dmesg -n 1
if [ -e /proc/self/fail-nth ]; then
    mount -t debugfs debugfs /sys/kernel/debug 2>/dev/null || true
    for faults in failslab fail_page_alloc; do
        echo N >/sys/kernel/debug/$faults/ignore-gfp-wait
        echo 0 >/sys/kernel/debug/$faults/verbose
    done
    echo 0 >/sys/kernel/debug/fail_page_alloc/min-order
fi
node-tests partial "$BDF"
dmesg -n 7
echo 0 >/proc/sys/vm/nr_hugepages
leave "$BDF"
rmmod nvme_gpu
# The IOMMU reports each page that the controller does not reach; where memory runs out the kernel shows its calls.
dmesg_clean DMAR dmar_fault ' [a-z0-9_.]+\+0x[0-9a-f]+/0x[0-9a-f]+ \[nvme_gpu\]$'
