# The machine is switched off while a program drives the function: the harness looks whether the controller was shut down.
lender_up
take "$BDF"
nvme-gpu bench --device "$DEVICE" --runtime 600s >/dev/null 2>&1 &
bench=$!
node=/dev/nvme-gpu-$BDF
is_enabled() {
    ls -l "/proc/$bench/fd" 2>/dev/null | grep -q "$node" && grep -q . "/proc/$bench/comm" &&
        [ "$(($(od -An -tu1 -j4 -N1 "/sys/bus/pci/devices/$BDF/config") >> 2 & 1))" = 1 ]
}
wait_for 20 is_enabled
# From the master of the bus to the first command.
sleep 2
is_enabled || fail "the bench is over"
dmesg_clean
