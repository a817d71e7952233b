# Transfers straight into a dma-buf and out of it: udmabuf's stands for the memory of a GPU.
lender_up
take "$BDF"
guest-tests peer "$DEVICE" udmabuf 16
leave "$BDF"
rmmod nvme_gpu
dmesg_clean
