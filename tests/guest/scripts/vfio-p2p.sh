# NVMe transfers straight into another device's memory (ivshmem in the place of a GPU's BAR1) and out of it.
modprobe vfio_iommu_type1
modprobe vfio-pci
take "$BDF"
peer=/sys/bus/pci/devices/$PEER
echo 1 >"$peer/enable"
nvme-gpu p2p --device "vfio:$BDF" --peer "$peer/resource2" --size 4MiB --allow-write
guest-tests peer "vfio:$BDF" "$peer/resource2" 16
# Rings there, too.
guest-tests rings "vfio:$BDF" "$peer/resource2"
# Debian's kernels have no iommufd: the option says so. On a kernel that has it, see vfio-iommufd.
if [ ! -e /dev/iommu ]; then
    fails_with 6 nvme-gpu regs --device "vfio:$BDF?iommu=iommufd" 2>/tmp/said
    cat /tmp/said
    grep -q 'offers no iommufd' /tmp/said
    nvme-gpu regs --device "vfio:$BDF?iommu=auto" >/dev/null
fi
# GPU memory by gdrcopy's module, of which a stand-in maps the same BAR.
guest-tests no-gdrdrv "vfio:$BDF" 'is not loaded'
insmod /kmod/gdrdrv_stand_in.ko bdf="$PEER"
guest-tests gdrdrv "vfio:$BDF" "$peer/resource2"
echo $((3 << 16)) >/sys/module/gdrdrv_stand_in/parameters/version
guest-tests no-gdrdrv "vfio:$BDF" 'version 3.0'
rmmod gdrdrv_stand_in
leave "$BDF"
dmesg_clean 'gdrdrv_stand_in: (loading out-of-tree module|module verification failed)'
