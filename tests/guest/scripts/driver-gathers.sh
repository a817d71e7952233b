# Rows to and from memory of a GPU by commands of its kernels; libcuda.so is the stand-in, its memory udmabuf's.
lender_up
take "$BDF"
case $LENDER in
nvme_gpu) tier=2 ;;
*) tier=1 ;;
esac
LD_LIBRARY_PATH=/usr/lib/fake-cuda guest-tests gathers "$DEVICE" $tier
leave "$BDF"
[ "$LENDER" != nvme_gpu ] || rmmod nvme_gpu
dmesg_clean
