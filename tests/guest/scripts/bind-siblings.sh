# Two controllers of one subsystem: neither is taken from Linux while a namespace is mounted by one of them, and what
# our driver has of the other is not written under the mount.
lender_up
modprobe ext4
says() {
    cat /tmp/said
    for _part in "$@"; do
        grep -q -F "$_part" /tmp/said || fail "not said: $_part"
    done
}
# Linux's driver with a disk for both paths ($1 is Y), or with one for each (N).
begin() {
    modprobe nvme_core "multipath=$1"
    modprobe nvme
    wait_for 20 live "$FIRST"
    wait_for 20 live "$SECOND"
    wait_for 20 disk_of S1 1
    disk=$(disk_of S1 1)
    wait_for 20 test -b "$disk"
}
# The end of it: the parameter is read when the module is loaded.
end() {
    linux_down
    rmmod nvme_core
}
both_refused() {
    mount -t ext4 "$disk" /mnt
    for _function in "$FIRST" "$SECOND"; do
        fails_with 2 nvme-gpu bind "$_function" 2>/tmp/said
        says "is mounted at /mnt" "unmount /mnt"
        [ "$(driver_of "$_function")" = nvme ] || fail "$_function was taken"
    done
    umount /mnt
}
begin Y
/usr/sbin/mke2fs -F -q -t ext4 "$disk"
both_refused
end
begin N
both_refused
# By which controller Linux goes on, and by which we do.
case $(readlink -f "/sys/class/block/$(basename "$disk")") in
*"$FIRST"*) ours=$SECOND ;;
*) ours=$FIRST ;;
esac
nvme-gpu bind "$ours"
mount -t ext4 "$disk" /mnt
head -c 65536 /dev/urandom >/tmp/data
for command in "write --lba 0 --in /tmp/data" "write-zeroes --lba 0 --blocks 8" \
    "dsm --slbs 0 --blocks 8 --deallocate" "format --namespace-id 1" "sanitize --sanact start-block-erase" \
    "set-feature -f 6 -V 1" "witness --quick --out /tmp/record --write-range 0:8" \
    "bench --rw randwrite --runtime 1s" "import /tmp/data"; do
    # shellcheck disable=SC2086 # Several words.
    fails_with 2 nvme-gpu $command --device "vfio:$ours" --allow-write 2>/tmp/said
    says "is mounted at /mnt" "unmount /mnt"
done
nvme-gpu read --device "vfio:$ours" --blocks 8 --out /dev/null
nvme-gpu identify ctrl --device "vfio:$ours" >/dev/null
umount /mnt
/usr/sbin/e2fsck -f -n "$disk"
nvme-gpu write --device "vfio:$ours" --lba 0 --in /tmp/data --allow-write
nvme-gpu unbind "$ours"
wait_for 20 live "$ours"
end
dmesg_clean "Found shared namespace" "shared namespaces without CONFIG_NVME_MULTIPATH"
