# bind refuses a disk that is in use and names what uses it; a user with rights on the group needs no root.
linux_up "$SERIAL"
disk=$(disk_of "$SERIAL" 1)
refused() {
    fails_with 2 nvme-gpu bind "$BDF" 2>/tmp/said
    cat /tmp/said
    grep -q "$1" /tmp/said || fail "the message does not name $1"
    [ "$(driver_of "$BDF")" = nvme ] || fail "the driver was taken away all the same"
}
modprobe ext4
/usr/sbin/mke2fs -q -t ext4 "$disk"
mount -t ext4 "$disk" /mnt
refused /mnt
umount /mnt
mkswap "$disk" >/dev/null
swapon "$disk"
refused swap
swapoff "$disk"
modprobe dm_mod
/usr/sbin/dmsetup --noudevsync create ours --table "0 2048 linear $disk 0"
refused "device mapper target ours"
/usr/sbin/dmsetup --noudevsync remove ours
linux_down
dmesg_clean
