# 1 GiB each way: written by one driver, compared by the other.
modprobe vfio_iommu_type1
modprobe vfio-pci
take "$BDF"
guest-tests fill "vfio:$BDF" 1 11 1024
guest-tests check "vfio:$BDF" 1 11 1024
give_back "$BDF" "$SERIAL"
disk=$(disk_of "$SERIAL" 1)
guest-tests pattern 11 1024 | cmp -n 1073741824 - "$disk"
guest-tests pattern 12 1024 | dd of="$disk" bs=1M iflag=fullblock oflag=direct
echo 3 >/proc/sys/vm/drop_caches
take "$BDF"
guest-tests check "vfio:$BDF" 1 12 1024
leave "$BDF"
dmesg_clean
