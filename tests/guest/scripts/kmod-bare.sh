# What is not opened, unless the module was told to: a function without an IOMMU, and one whose interrupts are not
# isolated. What is never opened: one that firmware has memory of its own for. A kernel that is locked down is not talked
# into any of it.
lender_up
for function in "$BDF" "$SHARED" "$RESERVED"; do
    take "$function"
done
[ ! -e "/sys/bus/pci/devices/$BDF/iommu_group" ] || fail "there is an IOMMU for $BDF"
[ -e "/sys/bus/pci/devices/$SHARED/iommu_group" ] || fail "there is no IOMMU for $SHARED"
grep -q '^0x00000000feffc000 0x00000000feffcfff direct$' "/sys/bus/pci/devices/$RESERVED/iommu_group/reserved_regions" ||
    fail "firmware has no memory of its own for $RESERVED"
EACCES=13
EOPNOTSUPP=95
refused() {
    node-tests refused "$1" "$2"
    fails_with 6 nvme-gpu read --device "kmod:$1" --blocks 8 --out /dev/null 2>/tmp/said
    cat /tmp/said
    grep -q "$3" /tmp/said || fail "the cause is not said"
}
refused "$BDF" $EOPNOTSUPP 'no IOMMU'
refused "$SHARED" $EACCES 'interrupts are not isolated'
tainted() {
    [ $(($(cat /proc/sys/kernel/tainted) >> 6 & 1)) = 1 ]
}
tainted && fail "the kernel is tainted by a user before anything was asked for"
leave "$BDF" "$SHARED" "$RESERVED"
rmmod nvme_gpu

insmod /kmod/nvme_gpu.ko unsafe=1
tainted || fail "unsafe=1 does not taint"
for function in "$BDF" "$SHARED" "$RESERVED"; do
    take "$function"
done
node-tests opens "$BDF" no
node-tests opens "$SHARED" yes
node-tests refused "$RESERVED" $EOPNOTSUPP
mount -t securityfs securityfs /sys/kernel/security
echo integrity >/sys/kernel/security/lockdown
node-tests refused "$BDF" $EOPNOTSUPP
node-tests refused "$SHARED" $EACCES
leave "$BDF" "$SHARED" "$RESERVED"
rmmod nvme_gpu
dmesg_clean "$RESERVED: Firmware has requested this device have a 1:1 IOMMU mapping"
