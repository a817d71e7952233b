# A transfer to an address that was never mapped: the IOMMU stops it and says so.
modprobe vfio_iommu_type1
modprobe vfio-pci
take "$BDF"
guest-tests confine "vfio:$BDF"
dmesg | grep 'DMAR:.*fault' || fail "the IOMMU reported no fault"
dmesg | grep -q "DMAR:.*${BDF#0000:}" || fail "the fault is not of $BDF"
leave "$BDF"
dmesg_clean DMAR
