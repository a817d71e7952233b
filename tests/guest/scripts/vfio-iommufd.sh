# VFIO by iommufd: BARs of another function as VFIO's dma-bufs, interrupts, rights, and what it cannot map.
lender_up
[ -c /dev/iommu ] || fail "this kernel has no iommufd"
take "$BDF"
peer=/sys/bus/pci/devices/$PEER
head -c 1048576 /dev/urandom >/tmp/data
says() {
    cat /tmp/said
    grep -q "$1" /tmp/said || fail "no '$1' in the message"
}

# One interface at a time has the group, and one program the device.
for pair in iommufd:type1 type1:iommufd iommufd:iommufd; do
    nvme-gpu bench --device "vfio:$BDF?iommu=${pair%:*}" --runtime 60s >/dev/null &
    bench=$!
    has_it() {
        ls -l /proc/$bench/fd | grep -q '/dev/vfio/[0-9d]'
    }
    wait_for 20 has_it
    sleep 1
    fails_with 6 nvme-gpu regs --device "vfio:$BDF?iommu=${pair#*:}" >/dev/null 2>/tmp/said
    says 'in use'
    kill -TERM $bench
    fails_with 130 wait $bench
done
nvme-gpu write --device "vfio:$BDF?iommu=auto" --lba 64 --in /tmp/data --allow-write
nvme-gpu compare --device "vfio:$BDF?iommu=type1" --lba 64 --in /tmp/data
nvme-gpu compare --device "$DEVICE" --irq --lba 64 --in /tmp/data
nvme-gpu compare --device "$DEVICE" --doorbells relay --lba 64 --in /tmp/data
# In huge pages, too.
echo 32 >/proc/sys/vm/nr_hugepages
guest-tests fill "$DEVICE" 1 11 64
echo 0 >/proc/sys/vm/nr_hugepages
guest-tests check "$DEVICE" 1 11 64

# A BAR by its address, and a dma-buf that is not VFIO's.
echo 1 >"$peer/enable"
guest-tests no-peer "$DEVICE" "$peer/resource2" 'maps no BAR by its address'
guest-tests no-peer "$DEVICE" udmabuf 'of another driver'
echo 0 >"$peer/enable"
# A BAR that VFIO exports.
fails_with 6 nvme-gpu p2p --device "$DEVICE" --peer "vfio:$PEER?bar=2" --size 4MiB 2>/tmp/said
says 'bound to no driver'
echo vfio-pci >"$peer/driver_override"
echo "$PEER" >/sys/bus/pci/drivers_probe
[ "$(driver_of "$PEER")" = vfio-pci ]
nvme-gpu p2p --device "$DEVICE" --peer "vfio:$PEER?bar=2" --size 4MiB --allow-write
fails_with 2 nvme-gpu p2p --device "$DEVICE" --peer "vfio:$PEER?bar=2" --size 32MiB 2>/tmp/said
says 'has no'
nvme-gpu p2p --device "vfio:$BDF" --peer "vfio:$PEER?bar=2" --offset 4MiB --size 4MiB --allow-write
guest-tests peer "$DEVICE" "vfio:$PEER?bar=2" 16
# Rings there, too.
guest-tests rings "$DEVICE" "vfio:$PEER?bar=2"
guest-tests rings-reset "$DEVICE" "vfio:$PEER?bar=2"
echo "$PEER" >/sys/bus/pci/drivers/vfio-pci/unbind
echo >"$peer/driver_override"

# A user with rights on the nodes needs no root.
mkdir -p /etc
echo 'root:x:0:0::/:/bin/sh
reader:x:1000:1000::/:/bin/sh' >/etc/passwd
echo 'root:x:0:
reader:x:1000:' >/etc/group
chmod 644 /tmp/data
as_user() {
    su reader -s /bin/sh -c "$*"
}
fails_with 6 as_user nvme-gpu compare --device "'$DEVICE'" --lba 64 --in /tmp/data 2>/tmp/said
says 'no permission to open /dev/iommu'
chown reader /dev/iommu
fails_with 6 as_user nvme-gpu compare --device "'$DEVICE'" --lba 64 --in /tmp/data 2>/tmp/said
says 'no permission to open /dev/vfio/devices/vfio'
nvme-gpu unbind "$BDF"
wait_for 20 live "$BDF"
nvme-gpu bind --user reader "$BDF"
as_user nvme-gpu write --device "'$DEVICE'" --lba 64 --in /tmp/data --allow-write
as_user nvme-gpu compare --device "'$DEVICE'" --lba 64 --in /tmp/data
(
    ulimit -l 64
    fails_with 6 as_user nvme-gpu read --device "'$DEVICE'" --blocks 8 --out /dev/null 2>/tmp/said
)
says 'cannot lock'
leave "$BDF"
dmesg_clean 'RLIMIT_MEMLOCK'
