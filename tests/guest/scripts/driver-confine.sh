# A transfer to an address that was never mapped: the IOMMU stops it and says so.
lender_up
take "$BDF"
guest-tests confine "$DEVICE"
dmesg | grep 'DMAR:.*fault' || fail "the IOMMU reported no fault"
dmesg | grep -q "DMAR:.*${BDF#0000:}" || fail "the fault is not of $BDF"
leave "$BDF"
# What other tests have provoked may be counted here.
dmesg_clean DMAR dmar_fault
