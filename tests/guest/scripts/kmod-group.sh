# Two functions of one group, with iommu=pt: one is not opened while Linux's driver has the other, and Linux's driver does
# not get the other while the one is open.
lender_up
EXDEV=18
group_of() {
    basename "$(readlink "/sys/bus/pci/devices/$1/iommu_group")"
}
[ "$(group_of "$FIRST")" = "$(group_of "$SECOND")" ] || fail "$FIRST and $SECOND are in two groups"
[ "$(cat "/sys/kernel/iommu_groups/$(group_of "$FIRST")/type")" = identity ] || fail "the group is translated"
take "$FIRST"
wait_for 20 live "$SECOND"
node-tests refused "$FIRST" $EXDEV
fails_with 6 nvme-gpu read --device "kmod:$FIRST" --blocks 8 --out /dev/null 2>/tmp/said
cat /tmp/said
grep -q 'another function of its IOMMU group' /tmp/said || fail "the cause is not said"

echo "$SECOND" >/sys/bus/pci/drivers/nvme/unbind
node-tests opens "$FIRST" yes
nvme-gpu read --device "kmod:$FIRST" --blocks 8 --out /dev/null
node-tests deaf "$FIRST" >/tmp/deaf 2>&1 &
deaf=$!
wait_for 20 grep -q version /tmp/deaf
echo "$SECOND" >/sys/bus/pci/drivers/nvme/bind 2>/dev/null && fail "Linux's driver has taken $SECOND"
[ ! -e "/sys/bus/pci/devices/$SECOND/driver" ] || fail "Linux's driver has $SECOND"
nvme-gpu unbind --force "$FIRST"
wait $deaf || { cat /tmp/deaf; fail "what the opener saw"; }
echo "$SECOND" >/sys/bus/pci/drivers/nvme/bind
wait_for 20 live "$SECOND"
wait_for 20 live "$FIRST"
linux_down
rmmod nvme_gpu
dmesg_clean
