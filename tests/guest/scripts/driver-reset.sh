# A reset of the function under a full queue: typed errors, then the same process works on.
lender_up
take "$BDF"
guest-tests reset "$DEVICE"
leave "$BDF"
dmesg_clean
