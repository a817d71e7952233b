# A BAR as a dma-buf (ivshmem in the place of a GPU): good addresses, wrong ones, and memory that is taken back.
lender_up
insmod /kmod/peer_exporter.ko bdf="$PEER"
take "$BDF"
guest-tests exporter "$BDF"
guest-tests peer "$DEVICE" exporter:good 16
guest-tests peer "$DEVICE" exporter:raw 16
guest-tests revoke "$DEVICE" data
leave "$BDF"
rmmod nvme_gpu
rmmod peer_exporter
dmesg_clean
