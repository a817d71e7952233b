# Rows to and from memory of a GPU by commands of its kernels; libcuda.so is the stand-in, its memory udmabuf's.
lender_up
take "$BDF"
case $LENDER in
nvme_gpu) tier=2 ;;
*) tier=1 ;;
esac
export LD_LIBRARY_PATH=/usr/lib/fake-cuda
guest-tests gathers "$DEVICE" $tier
if [ "$LENDER" = nvme_gpu ]; then
    # Rings in memory of the GPU, too. A transfer has 256 MiB of data memory.
    echo 512 >/sys/module/udmabuf/parameters/size_limit_mb
    guest-tests gathers "$DEVICE" 3
    head -c 262144 /dev/urandom >/tmp/data
    nvme-gpu write --device "$DEVICE" --lba 64 --in /tmp/data --allow-write
    nvme-gpu read --device "$DEVICE" --gpu --tier 3 --lba 64 --blocks 512 --out /tmp/back >/tmp/said
    cmp /tmp/data /tmp/back
    nvme-gpu stream --device "$DEVICE" --gpu --tier 3 --size 4MiB >/tmp/said
    cat /tmp/said
    grep -q 'tier 3' /tmp/said
    guest-tests fill "$DEVICE" 1 5 8
    NVME_GPU_DEVICE=$DEVICE guest-tests spdk 5 8
else
    fails_with 6 nvme-gpu read --device "$DEVICE" --gpu --tier 3 --blocks 8 --out /tmp/back 2>/tmp/said
    cat /tmp/said
    grep -q 'tier 3 does not work' /tmp/said
fi
leave "$BDF"
[ "$LENDER" != nvme_gpu ] || rmmod nvme_gpu
dmesg_clean
