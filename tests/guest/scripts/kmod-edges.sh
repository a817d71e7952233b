# The edges of the module: what it refuses, an unbind while it is open, malformed calls, and that nothing is left.
lender_up
take "$BDF"
node=/dev/nvme-gpu-$BDF
[ "$(stat -c %a "$node")" = 600 ] || fail "other users may open $node"
says() {
    cat /tmp/said
    grep -q "$1" /tmp/said || fail "not said: $1"
}
# Some process has $1 open.
is_open() {
    ls -l /proc/[0-9]*/fd 2>/dev/null | grep -q "$1"
}

# One opener at a time.
nvme-gpu bench --device "$DEVICE" --runtime 60s --queues 2 --depth 16 >/tmp/first 2>&1 &
first=$!
wait_for 20 is_open "$node"
fails_with 6 nvme-gpu read --device "$DEVICE" --blocks 8 --out /dev/null 2>/tmp/said
says 'another process has'

# An unbind by force asks the opener to leave, which does: the command under way ends with the cause.
fails_with 2 nvme-gpu unbind "$BDF" 2>/tmp/said
says "$node is open in nvme-gpu (pid $first)"
nvme-gpu unbind --force "$BDF"
wait $first && fail "a bench without a device succeeded"
cat /tmp/first
grep -q 'wants the device back' /tmp/first || fail "the cause is not said"
wait_for 20 live "$BDF"
[ ! -e "$node" ] || fail "$node is left"

# An opener that does not listen loses the device all the same.
take "$BDF"
node-tests deaf "$BDF" >/tmp/deaf 2>&1 &
deaf=$!
wait_for 20 is_open "$node"
nvme-gpu unbind --force "$BDF"
wait $deaf || { cat /tmp/deaf; fail "what a deaf opener saw"; }
cat /tmp/deaf
wait_for 20 live "$BDF"

# The type of the group is its own: the module translates in its own way, and leaves the type as it is.
group=$(basename "$(readlink "/sys/bus/pci/devices/$BDF/iommu_group")")
take "$BDF"
echo DMA-FQ >"/sys/kernel/iommu_groups/$group/type"
nvme-gpu read --device "$DEVICE" --blocks 8 --out /dev/null
node-tests opens "$BDF" yes
[ "$(cat "/sys/kernel/iommu_groups/$group/type")" = DMA-FQ ] || fail "the group's type is another one"

# Without privileges, and with too little memory that may be locked.
mkdir -p /etc
echo 'root:x:0:0::/:/bin/sh
reader:x:1000:1000::/:/bin/sh' >/etc/passwd
echo 'root:x:0:
reader:x:1000:' >/etc/group
chmod 666 "$node"
fails_with 6 su reader -s /bin/sh -c "nvme-gpu read --device '$DEVICE' --blocks 8 --out /dev/null" 2>/tmp/said
says 'CAP_SYS_RAWIO'
chmod 600 "$node"
node-tests limits "$BDF"
node-tests many "$BDF" 65535
node-tests untold "$BDF"
node-tests no-peer "$BDF"
node-tests read-only "$BDF"
node-tests compat "$BDF"
node-tests fork "$BDF"

# Calls with every kind of wrong argument; the function works afterwards.
node-tests calls "$BDF" 15
nvme-gpu read --device "$DEVICE" --blocks 8 --out /dev/null

leave "$BDF"

# What is no NVMe function is not taken, though driver_override names the module; nor one that only new_id names.
echo nvme_gpu >"/sys/bus/pci/devices/$BESIDE/driver_override"
echo "$BESIDE" >/sys/bus/pci/drivers/nvme_gpu/bind 2>/dev/null && fail "$BESIDE is no NVMe function, and was bound"
[ ! -e "/sys/bus/pci/devices/$BESIDE/driver" ] || fail "$BESIDE has a driver"
echo >"/sys/bus/pci/devices/$BESIDE/driver_override"
identifier="$(cut -c 3- "/sys/bus/pci/devices/$BDF/vendor") $(cut -c 3- "/sys/bus/pci/devices/$BDF/device")"
echo "$identifier" >/sys/bus/pci/drivers/nvme_gpu/new_id
[ ! -e "/sys/bus/pci/devices/$BDF/driver" ] || fail "new_id has bound $BDF"
rmmod nvme_gpu
[ "$(grep -c nvme_gpu /proc/iomem)" = 0 ] || fail "a BAR is still claimed"
dmesg_clean
