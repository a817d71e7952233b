# Errors of the medium, ranges and comparisons come back as what they are, with command and LBA.
modprobe vfio_iommu_type1
modprobe vfio-pci
take "$FAULTY"
device=vfio:$FAULTY
head -c 65536 /dev/urandom >/tmp/data
says() {
    grep -i -q "$1" /tmp/said || { cat /tmp/said; fail "no '$1' in the message"; }
}
# QEMU's block layer is told to fail reads of sector 2048 and writes of sector 4096.
fails_with 1 nvme-gpu read --device "$device" --lba 2048 --blocks 1 --out /tmp/out 2>/tmp/said
cat /tmp/said
says 'Unrecovered Read Error'
says 'Read'
says '2048'
fails_with 1 nvme-gpu write --device "$device" --lba 4096 --in /tmp/data --allow-write 2>/tmp/said
cat /tmp/said
says 'Write Fault'
says 'Write'
says '4096'
# Neighbours and the rest are well.
nvme-gpu write --device "$device" --lba 8192 --in /tmp/data --allow-write
nvme-gpu compare --device "$device" --lba 8192 --in /tmp/data
fails_with 3 nvme-gpu compare --device "$device" --lba 8193 --in /tmp/data 2>/tmp/said
cat /tmp/said
fails_with 2 nvme-gpu read --device "$device" --lba 99999999 --blocks 1 --out /tmp/out 2>/tmp/said
cat /tmp/said
says 99999999
# The controller's own answers to what our tool would not send.
guest-tests refusals "$device" 1
leave "$FAULTY"
dmesg_clean
