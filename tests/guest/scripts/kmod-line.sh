# A function on the line of another one, whose driver has no MSI: what we drive raises nothing there.
lender_up
modprobe nvme
for function in "$FIRST" "$BDF"; do
    wait_for 20 live "$function"
done
echo "$FIRST" >/sys/bus/pci/drivers/nvme/unbind
echo 0 >"/sys/bus/pci/devices/$FIRST/msi_bus"
echo "$FIRST" >/sys/bus/pci/drivers/nvme/bind
wait_for 20 live "$FIRST"
line=$(basename "$(echo "/sys/bus/pci/devices/$FIRST/nvme/"*)")q0
grep "$line" /proc/interrupts
modprobe vfio_iommu_type1
modprobe vfio-pci
take "$BDF"
for tool in nvme_gpu vfio-pci; do
    nvme-gpu bind --driver "$tool" "$BDF"
    before=$(awk -v q="$line" '$0 ~ q {print $2 + $3}' /proc/interrupts)
    [ $tool = vfio-pci ] || node-tests line "$BDF" "$line"
    device=$([ $tool = nvme_gpu ] && echo kmod || echo vfio):$BDF
    nvme-gpu identify ctrl --device "$device" >/dev/null
    nvme-gpu read --device "$device" --blocks 8 --out /dev/null
    after=$(awk -v q="$line" '$0 ~ q {print $2 + $3}' /proc/interrupts)
    [ "$before" = "$after" ] || fail "$((after - before)) interrupts on the line of $line by $tool"
done
echo 1 >"/sys/bus/pci/devices/$FIRST/msi_bus"
leave "$BDF"
rmmod nvme_gpu
dmesg_clean
