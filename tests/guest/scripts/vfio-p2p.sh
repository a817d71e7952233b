# NVMe transfers straight into another device's memory (ivshmem in the place of a GPU's BAR1) and out of it.
modprobe vfio_iommu_type1
modprobe vfio-pci
take "$BDF"
peer=/sys/bus/pci/devices/$PEER
echo 1 >"$peer/enable"
nvme-gpu p2p --device "vfio:$BDF" --peer "$peer/resource2" --size 4MiB --allow-write
guest-tests peer "vfio:$BDF" "$peer/resource2" 16
leave "$BDF"
dmesg_clean
