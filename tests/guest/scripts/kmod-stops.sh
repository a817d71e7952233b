# What stops the function beside its opener: a reset by an administrator, a sleep; and a function without a reset.
lender_up
take "$BDF"
node-tests by-system "$BDF"
node-tests by-sleep "$BDF"
node-tests without-reset "$BDF"
nvme-gpu read --device "$DEVICE" --blocks 8 --out /dev/null
leave "$BDF"
rmmod nvme_gpu
dmesg_clean 'All device reset methods disabled by user'
