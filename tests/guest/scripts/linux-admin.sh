# What nvme-cli asks of a controller.
linux_up "$SERIAL"
controller=/dev/$(controller_of "$SERIAL")
disk=$(disk_of "$SERIAL" 1)
nvme list
nvme id-ctrl "$controller"
nvme id-ns "$disk"
nvme list-ns "$controller"
nvme smart-log "$controller"
nvme error-log "$controller" -e 4
for feature in 1 2 4 6 7 8 9 10 11; do
    nvme get-feature "$controller" -f $feature -H
done
nvme get-feature "$controller" -n 1 -f 5 -H
size_before=$(cat "/sys/class/block/$(basename "$disk")/size")
for format in 1 0; do
    nvme format "$disk" -l $format --force
    nvme id-ns "$disk" | grep "in use" | grep "lbaf *$format "
done
[ "$(cat "/sys/class/block/$(basename "$disk")/size")" = "$size_before" ] || fail "the disk changed its size"
dd if="$disk" bs=64k count=16 iflag=direct 2>/dev/null | cmp -n 1048576 - /dev/zero
nvme reset "$controller"
wait_for 20 grep -q live "/sys/class/nvme/$(basename "$controller")/state"
linux_down
dmesg_clean 'resetting controller'
