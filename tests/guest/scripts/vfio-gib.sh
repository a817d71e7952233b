# 1 GiB each way: written by one driver, compared by the other.
modprobe vfio_iommu_type1
modprobe vfio-pci
take "$BDF"
guest-tests fill "vfio:$BDF" 1 11 1024
# Of what it wrote itself, a part: Linux compares all of it.
guest-tests check "vfio:$BDF" 1 11 64
give_back "$BDF" "$SERIAL"
disk=$(disk_of "$SERIAL" 1)
guest-tests compare 11 1024 "$disk"
guest-tests store 12 1024 "$disk"
# This time buffers of 2 MiB and more come in huge pages.
echo 32 >/proc/sys/vm/nr_hugepages
take "$BDF"
guest-tests check "vfio:$BDF" 1 12 1024
leave "$BDF"
dmesg_clean
