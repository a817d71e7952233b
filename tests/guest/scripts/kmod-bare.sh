# No IOMMU: nothing is opened, unless the module was told to. A kernel that is locked down is not talked into it.
lender_up
take "$BDF"
EOPNOTSUPP=95
node-tests refused "$BDF" $EOPNOTSUPP
fails_with 6 nvme-gpu read --device "$DEVICE" --blocks 8 --out /dev/null 2>/tmp/said
cat /tmp/said
grep -q 'no IOMMU' /tmp/said || fail "the cause is not said"
tainted() {
    [ $(($(cat /proc/sys/kernel/tainted) >> 6 & 1)) = 1 ]
}
tainted && fail "the kernel is tainted by a user before anything was asked for"
leave "$BDF"
rmmod nvme_gpu

insmod /kmod/nvme_gpu.ko unsafe=1
tainted || fail "unsafe=1 does not taint"
take "$BDF"
node-tests opens "$BDF" no
mount -t securityfs securityfs /sys/kernel/security
echo integrity >/sys/kernel/security/lockdown
node-tests refused "$BDF" $EOPNOTSUPP
leave "$BDF"
rmmod nvme_gpu
dmesg_clean
