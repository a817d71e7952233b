# kill -9 at random moments, 50 times; every fresh start works, and Linux can take the device back.
lender_up
take "$BDF"
device=$DEVICE
early=0
for round in $(seq 50); do
    nvme-gpu bench --device "$device" --rw randrw --runtime 60s --queues 2 --depth 16 --allow-write >/dev/null 2>&1 &
    victim=$!
    usleep $((20000 + $(od -An -N2 -tu2 /dev/urandom) * 4))
    kill -0 $victim 2>/dev/null || fail "round $round: the tool was gone before it was killed"
    kill -9 $victim
    wait $victim || true
    if [ $((round % 10)) = 0 ]; then
        nvme-gpu read --device "$device" --blocks 64 --out /dev/null
    fi
done
head -c 65536 /dev/urandom >/tmp/data
nvme-gpu write --device "$device" --lba 0 --in /tmp/data --allow-write
nvme-gpu compare --device "$device" --lba 0 --in /tmp/data
give_back "$BDF" "$SERIAL"
dd if="$(disk_of "$SERIAL" 1)" bs=65536 count=1 iflag=direct 2>/dev/null | cmp - /tmp/data
linux_down
dmesg_clean
