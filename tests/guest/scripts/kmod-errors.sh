# Errors of the bus at the port above a drive: those from which the system recovers, without a reset of the link and
# with one; one from which it does not; one after which the link stays down.
lender_up
take "$BEHIND"
node-tests by-error "$BEHIND" rp0 COMP_TIME
node-tests by-error "$BEHIND" rp0 DLP
guest-tests bus-error "kmod:$BEHIND" rp0 COMP_TIME
guest-tests bus-error "kmod:$BEHIND" rp0 DLP
take "$LOST"
node-tests lost "$LOST" rp1 COMP_TIME
nvme-gpu read --device "kmod:$LOST" --blocks 8 --out /dev/null
node-tests dead "$LOST" rp1 DLP
fails_with 5 nvme-gpu read --device "kmod:$LOST" --blocks 8 --out /dev/null

# What was lost comes back as another function would.
echo 1 >"/sys/bus/pci/devices/$LOST/remove"
[ ! -e "/dev/nvme-gpu-$LOST" ] || fail "the node is left"
echo 1 >/sys/bus/pci/rescan
take "$LOST"
nvme-gpu read --device "kmod:$LOST" --blocks 8 --out /dev/null
leave "$BEHIND" "$LOST"
rmmod nvme_gpu
dmesg_clean
