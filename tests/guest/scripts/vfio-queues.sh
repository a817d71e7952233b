# Queues of 2 and of the largest size, wrapped often, and 64 of them.
modprobe vfio_iommu_type1
modprobe vfio-pci
take "$BDF"
guest-tests queues "vfio:$BDF" 1
leave "$BDF"
dmesg_clean
