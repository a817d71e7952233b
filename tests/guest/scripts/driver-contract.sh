# What every device promises the driver, on one behind a kernel driver; at the end an unbind takes it away.
lender_up
take "$BDF"
guest-tests contract "$DEVICE" "nvme-gpu unbind --force $BDF"
wait_for 20 live "$BDF"
# The tool may not be quite done with the function.
wait_for 20 rmmod nvme
# A read to memory that was unmapped is stopped by the IOMMU.
dmesg_clean DMAR
