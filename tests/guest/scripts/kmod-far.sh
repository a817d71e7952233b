# Memory of a peer behind a host bridge of which the kernel does not know that it passes transactions on: it is not mapped,
# unless the module was told to.
lender_up
insmod /kmod/peer_exporter.ko bdf="$PEER"
take "$BDF"
for kind in good raw; do
    fails_with 1 guest-tests peer "$DEVICE" "exporter:$kind" 16 2>/tmp/said
    cat /tmp/said
    grep -q "does not know that $BDF reaches" /tmp/said || fail "the cause is not said"
done
leave "$BDF"
rmmod nvme_gpu
insmod /kmod/nvme_gpu.ko unsafe=1
take "$BDF"
guest-tests peer "$DEVICE" exporter:good 16
leave "$BDF"
rmmod nvme_gpu
rmmod peer_exporter
dmesg_clean
