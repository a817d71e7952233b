# Queues of 2 and of the largest size, wrapped often, and 64 of them.
lender_up
take "$BDF"
guest-tests queues "$DEVICE" 1
leave "$BDF"
dmesg_clean
