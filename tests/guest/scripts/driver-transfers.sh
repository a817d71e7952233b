# Transfers around every boundary, by PRP and SGL.
lender_up
take "$BDF"
guest-tests transfers "$DEVICE" 1
leave "$BDF"
dmesg_clean
