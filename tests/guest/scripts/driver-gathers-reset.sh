# Rows to memory of a GPU, whose queues lose their rings to resets of the function: rings in GPU memory, and in pinned.
lender_up
take "$BDF"
export LD_LIBRARY_PATH=/usr/lib/fake-cuda
for tier in 3 2; do
    guest-tests gathers-reset "$DEVICE" $tier
done
leave "$BDF"
[ "$LENDER" != nvme_gpu ] || rmmod nvme_gpu
dmesg_clean
