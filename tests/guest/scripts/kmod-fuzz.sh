# Calls that are mostly right, by several threads, with kills, resets and unbinds under them.
lender_up
take "$BDF"
echo 100 >/sys/module/nvme_gpu/parameters/grace_ms
[ -z "${FUZZ_SECONDS:-}" ] || node-tests many "$BDF" 65535
node-tests fuzz "$BDF" "${FUZZ_SECONDS:-60}"
leave "$BDF"
rmmod nvme_gpu
dmesg_clean
