# Completions by interrupts instead of polling.
modprobe vfio_iommu_type1
modprobe vfio-pci
take "$BDF"
device=vfio:$BDF
head -c 1048576 /dev/urandom >/tmp/data
nvme-gpu write --device "$device" --irq --lba 64 --in /tmp/data --allow-write
nvme-gpu compare --device "$device" --lba 64 --in /tmp/data
nvme-gpu compare --device "$device" --irq --lba 64 --in /tmp/data
nvme-gpu bench --device "$device" --irq --io-size 8MiB --size 16MiB --rw randrw --queues 2 --verify --allow-write
# The kernel counts them, as long as the device is open.
nvme-gpu bench --device "$device" --irq --runtime 20s --queues 2 --depth 4 >/dev/null &
bench=$!
interrupted() {
    grep vfio-msix /proc/interrupts | awk '{ all += $2 + $3 } END { exit !(all > 100) }'
}
wait_for 15 interrupted
grep vfio-msix /proc/interrupts
# Not SIGINT: the shell ignores it in what runs beside it, and so does the tool.
kill -TERM $bench
fails_with 130 wait $bench
leave "$BDF"
dmesg_clean
