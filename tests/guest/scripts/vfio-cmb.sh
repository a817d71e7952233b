# Queues in the controller memory buffer, in both of its forms.
modprobe vfio_iommu_type1
modprobe vfio-pci
head -c 262144 /dev/urandom >/tmp/data
export LD_LIBRARY_PATH=/usr/lib/fake-cuda
for function in $CMBS; do
    take "$function"
    device=vfio:$function
    nvme-gpu write --device "$device" --rings cmb --lba 0 --in /tmp/data --allow-write
    nvme-gpu compare --device "$device" --rings cmb --lba 0 --in /tmp/data
    nvme-gpu compare --device "$device" --lba 0 --in /tmp/data
    nvme-gpu bench --device "$device" --rings cmb --io-size 8MiB --size 16MiB --rw randrw --queues 2 --verify --allow-write
    # The same for queues of a GPU, the stand-in of CUDA, and its data there, too.
    for place in "--rings cmb" "--data-in-cmb" "--rings cmb --data-in-cmb"; do
        nvme-gpu write --device "$device" --gpu $place --bytes 64KiB --lba 4096 --in /tmp/data --allow-write
        nvme-gpu compare --device "$device" --lba 4096 --in /tmp/data
        nvme-gpu read --device "$device" --gpu $place --bytes 64KiB --lba 4096 --blocks 512 --out /tmp/back
        cmp /tmp/data /tmp/back
    done
    leave "$function"
done
# A controller without one says so.
take "$BDF"
fails_with 1 nvme-gpu read --device "vfio:$BDF" --rings cmb --blocks 1 --out /tmp/out 2>/tmp/said
cat /tmp/said
grep -q -i 'memory buffer\|CMB' /tmp/said
for place in "--rings cmb" "--data-in-cmb"; do
    fails_with 1 nvme-gpu read --device "vfio:$BDF" --gpu $place --blocks 1 --out /tmp/out 2>/tmp/said
    cat /tmp/said
    grep -q -i 'memory buffer\|CMB' /tmp/said
done
leave "$BDF"
# Linux has a use for the memory buffer only with peer-to-peer support.
dmesg_clean 'failed to register the CMB'
