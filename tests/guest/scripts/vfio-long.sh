# The long run: random verified I/O for $SECONDS_LONG seconds, and nothing may grow.
modprobe vfio_iommu_type1
modprobe vfio-pci
take "$BDF"
guest-tests mixed "vfio:$BDF" 1 "$SECONDS_LONG" 20261121
leave "$BDF"
dmesg_clean
