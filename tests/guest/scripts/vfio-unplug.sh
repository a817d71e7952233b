# Orderly hot unplug while a process reads: it gets a typed error, lets go, and goes on with another device.
modprobe vfio_iommu_type1
modprobe vfio-pci
take "$BDF"
take "$LEAVING"
guest-tests unplug "vfio:$LEAVING" "vfio:$BDF" leaving
wait_for 20 test ! -e "/sys/bus/pci/devices/$LEAVING"
leave "$BDF"
dmesg_clean
