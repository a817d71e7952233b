# A function with virtual functions, which may be in use: the tool leaves it, and so does the module.
says() {
    cat /tmp/said
    for _part in "$@"; do
        grep -q -F "$_part" /tmp/said || fail "not said: $_part"
    done
}
modprobe vfio_iommu_type1
modprobe vfio-pci
modprobe nvme
wait_for 20 live "$PARENT"
echo 0 >"/sys/bus/pci/devices/$PARENT/sriov_drivers_autoprobe"
echo 1 >"/sys/bus/pci/devices/$PARENT/sriov_numvfs"
fails_with 2 nvme-gpu bind "$PARENT" 2>/tmp/said
says "$PARENT has 1 virtual function" "sriov_numvfs"
# Nor does the module take it from who does not use the tool.
insmod /kmod/nvme_gpu.ko
echo nvme_gpu >"/sys/bus/pci/devices/$PARENT/driver_override"
echo "$PARENT" >/sys/bus/pci/drivers/nvme/unbind
echo "$PARENT" >/sys/bus/pci/drivers/nvme_gpu/bind 2>/dev/null && fail "the module has a function with a virtual one"
[ ! -e "/sys/bus/pci/devices/$PARENT/driver" ] || fail "$PARENT has a driver"
rmmod nvme_gpu
echo >"/sys/bus/pci/devices/$PARENT/driver_override"
echo "$PARENT" >/sys/bus/pci/drivers/nvme/bind
wait_for 20 live "$PARENT"
echo 0 >"/sys/bus/pci/devices/$PARENT/sriov_numvfs"
take "$PARENT"
leave "$PARENT"
dmesg_clean "$PARENT: (probe with driver nvme_gpu failed|driver left SR-IOV enabled)"
