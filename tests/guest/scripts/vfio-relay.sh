# Tier 0: doorbells stored in memory and passed on to the real ones by a thread.
modprobe vfio_iommu_type1
modprobe vfio-pci
take "$BDF"
device=vfio:$BDF
head -c 1048576 /dev/urandom >/tmp/data
nvme-gpu write --device "$device" --doorbells relay --lba 64 --in /tmp/data --allow-write
nvme-gpu compare --device "$device" --lba 64 --in /tmp/data
nvme-gpu compare --device "$device" --doorbells relay --lba 64 --in /tmp/data
nvme-gpu bench --device "$device" --doorbells relay --io-size 8MiB --size 16MiB --rw randrw --queues 2 --verify --allow-write
leave "$BDF"
dmesg_clean
