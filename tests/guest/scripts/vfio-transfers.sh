# Transfers around every boundary, by PRP and SGL.
modprobe vfio_iommu_type1
modprobe vfio-pci
take "$BDF"
guest-tests transfers "vfio:$BDF" 1
leave "$BDF"
dmesg_clean
