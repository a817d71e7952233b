# Submission queues, completion queues and data in the BAR of another function (ivshmem in the place of a GPU), which
# the module imports as a dma-buf; then the BAR is taken back under load.
lender_up
insmod /kmod/peer_exporter.ko bdf="$PEER"
take "$BDF"
guest-tests rings "$DEVICE" exporter:good
guest-tests rings "$DEVICE" exporter:raw
guest-tests rings-reset "$DEVICE" exporter:good
guest-tests revoke "$DEVICE" rings
leave "$BDF"
rmmod nvme_gpu
rmmod peer_exporter
dmesg_clean
