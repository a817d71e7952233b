# Errors of the bus at the port above a drive: those from which the system recovers, without a reset of the link and
# with one; one from which it does not; one after which the link stays down; and a function that is pulled out.
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

# What is pulled out under its opener is not waited for, however long an unbind may wait.
echo 60000 >/sys/module/nvme_gpu/parameters/grace_ms
port=$(basename "$(readlink -f "/sys/bus/pci/devices/$BEHIND/..")")
node-tests pulled "$BEHIND" "$port"
[ ! -e "/dev/nvme-gpu-$BEHIND" ] || fail "the node of what was pulled out is left"
[ ! -e "/sys/bus/pci/devices/$BEHIND" ] || fail "what was pulled out is left"
echo 2000 >/sys/module/nvme_gpu/parameters/grace_ms
leave "$LOST"
rmmod nvme_gpu
dmesg_clean
