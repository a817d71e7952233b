# Every command of the tool on a controller behind vfio-pci, or behind the module nvme_gpu.
lender_up
nvme-gpu list
take "$BDF"
nvme-gpu list
nvme-gpu doctor >/tmp/doctor
cat /tmp/doctor
grep -q "ok *iommu: on" /tmp/doctor
grep -q "ok *driver: $LENDER" /tmp/doctor
grep -q "ok *group: .*isolated" /tmp/doctor
device=$DEVICE
nvme-gpu regs --device "$device" --raw
nvme-gpu regs --device "$device" --json >/tmp/regs
grep -q '"CAP"\|"cap"' /tmp/regs
nvme-gpu identify ctrl --device "$device" >/tmp/id
grep -q "$SERIAL" /tmp/id
nvme-gpu identify ns --device "$device"
nvme-gpu list-ns --device "$device"
nvme-gpu smart-log --device "$device" --json
nvme-gpu error-log --device "$device"
nvme-gpu get-feature --device "$device" -f 7
nvme-gpu set-feature --device "$device" -f 6 -V 1 --allow-write

nvme-gpu get-log --device "$device" -i 2 -l 512 -b >/tmp/smart
[ "$(wc -c </tmp/smart)" = 512 ]
nvme-gpu admin-passthru --device "$device" -O 6 --cdw10 1 -l 4096 -r -b >/tmp/page
grep -q "$SERIAL" /tmp/page
fails_with 2 nvme-gpu admin-passthru --device "$device" -O 9 --cdw10 6 --cdw11 1
nvme-gpu admin-passthru --device "$device" -O 9 --cdw10 6 --cdw11 1 --allow-write
fails_with 2 nvme-gpu reset --device "$device"
nvme-gpu reset --device "$device" --allow-write

head -c 1048576 /dev/urandom >/tmp/data
# Without the switch nothing is written, and exit code 2 says so.
nvme-gpu read --device "$device" --lba 256 --blocks 2048 --out /tmp/before
fails_with 2 nvme-gpu write --device "$device" --lba 256 --in /tmp/data
nvme-gpu read --device "$device" --lba 256 --blocks 2048 --out /tmp/after
cmp /tmp/before /tmp/after
nvme-gpu write --device "$device" --lba 256 --in /tmp/data --allow-write
nvme-gpu write --device "$device" --lba 4096 --in /tmp/data --fua --allow-write
nvme-gpu read --device "$device" --lba 256 --blocks 2048 --out /tmp/back
cmp /tmp/data /tmp/back
nvme-gpu compare --device "$device" --lba 4096 --in /tmp/data
fails_with 3 nvme-gpu compare --device "$device" --lba 4097 --in /tmp/data
block=$(nvme-gpu identify ns --device "$device" | sed -n 's/.*blocks of \([0-9]*\) bytes.*/\1/p')
nvme-gpu io-passthru --device "$device" -O 2 --cdw10 4096 -l "$block" -r -b | cmp - /tmp/data -n "$block"
head -c "$block" /tmp/data >/tmp/one
fails_with 2 nvme-gpu io-passthru --device "$device" -O 1 --cdw10 8192 -l "$block" -w -i /tmp/one
nvme-gpu io-passthru --device "$device" -O 1 --cdw10 8192 -l "$block" -w -i /tmp/one --allow-write
nvme-gpu io-passthru --device "$device" -O 2 --cdw10 8192 -l "$block" -r -b | cmp - /tmp/one
for command in "write-zeroes --lba 0 --blocks 8" "dsm --slbs 0,64 --blocks 8,8 --deallocate"; do
    fails_with 2 nvme-gpu $command --device "$device"
    nvme-gpu $command --device "$device" --allow-write
done
nvme-gpu flush --device "$device"
nvme-gpu read --device "$device" --lba 0 --blocks 8 --out /tmp/zeroes
cmp -n 4096 /tmp/zeroes /dev/zero
nvme-gpu bench --device "$device" --runtime 1s --queues 2 --depth 16
nvme-gpu write --device "$device" --lba 65536 --in /tmp/data --allow-write
nvme-gpu bench --device "$device" --io-size 8MiB --size 16MiB --rw randrw --verify --allow-write --json >/tmp/bench
fails_with 2 nvme-gpu demo --device "$device" --size 16MiB
nvme-gpu demo --device "$device" --size 16MiB --queues 2 --allow-write --json >/tmp/demo
cat /tmp/demo
grep -q '"verified": *true' /tmp/demo
nvme-gpu stream --device "$device" --size 16MiB --json
nvme-gpu topology
nvme-gpu topology --json | grep -q "\"address\":\"$BDF\".*\"kind\":\"nvme\""
fails_with 2 nvme-gpu witness --cpu --write-range 8192:256 --out /tmp/witness.json
nvme-gpu witness --cpu --quick --write-range 8192:256 --allow-write --out /tmp/witness.json
nvme-gpu witness --check /tmp/witness.json
nvme-gpu witness --check /tmp/witness.json | grep -q "SIMULATOR: QEMU"
fails_with 2 nvme-gpu bench --device "$device" --rw randwrite --io-size 1MiB
fails_with 2 nvme-gpu read --device "$device" --lba 999999999 --blocks 1
fails_with 2 nvme-gpu read --device "$device" --namespace-id 77 --blocks 1
fails_with 6 nvme-gpu read --device "${DEVICE%%:*}:0000:00:1d.7" --blocks 1
give_back "$BDF" "$SERIAL"
disk=$(disk_of "$SERIAL" 1)
dd if="$disk" bs=512 skip=65536 count=2048 iflag=direct 2>/dev/null | cmp - /tmp/data
linux_down
dmesg_clean
