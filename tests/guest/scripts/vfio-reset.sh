# A reset of the function under a full queue: typed errors, then the same process works on.
modprobe vfio_iommu_type1
modprobe vfio-pci
take "$BDF"
guest-tests reset "vfio:$BDF"
leave "$BDF"
dmesg_clean
