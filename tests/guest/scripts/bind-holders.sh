# bind names everything that uses a drive and leaves the drive to Linux; unbind does so for a function that is lent.
lender_up
modprobe ext4
linux_up "$SERIAL"
disk=$(disk_of "$SERIAL" 1)
name=$(basename "$disk")
controller=/dev/$(controller_of "$SERIAL")
generic=/dev/ng${name#nvme}
says() {
    cat /tmp/said
    for _part in "$@"; do
        grep -q -F "$_part" /tmp/said || fail "not said: $_part"
    done
}
refused() {
    fails_with 2 nvme-gpu bind "$BDF" 2>/tmp/said
    says "$@" "or add --force"
    [ "$(driver_of "$BDF")" = nvme ] || fail "the driver was taken away all the same"
}
# A program that has the file $1 open: its number is in $holder.
hold() {
    sleep 600 5<>"$1" &
    holder=$!
}
drop() {
    kill "$holder"
    wait "$holder" || true
}
file_system() {
    /usr/sbin/mke2fs -F -q -t ext4 "$disk"
}

# A mount in another mount namespace, and one that no namespace shows any more.
file_system
rm -f /tmp/stop
unshare -m sh -c "mount -t ext4 $disk /mnt; while [ ! -e /tmp/stop ]; do usleep 100000; done" &
holder=$!
wait_for 20 grep -q "$disk" "/proc/$holder/mountinfo"
refused "$name is mounted at /mnt in the mount namespace of sh (pid $holder)"
touch /tmp/stop
wait "$holder"
mount -t ext4 "$disk" /mnt
hold /mnt/file
umount -l /mnt
refused "$name is in use (opened exclusively"
drop

# Loop devices and exports open the disk without claiming it.
modprobe loop
losetup /dev/loop0 "$disk"
mount -t ext4 /dev/loop0 /mnt
refused "loop0 is a loop device over $disk" "loop0 is mounted at /mnt" "losetup -d /dev/loop0"
umount /mnt
refused "loop0 is a loop device over $disk"
losetup -d /dev/loop0
modprobe nvmet
fails_with 6 nvme-gpu bind "$BDF" 2>/tmp/said
says "what nvmet exports" "mount -t configfs"
mount -t configfs none /sys/kernel/config
export=/sys/kernel/config/nvmet/subsystems/ours
mkdir -p "$export/namespaces/1"
echo -n "$disk" >"$export/namespaces/1/device_path"
echo 1 >"$export/namespaces/1/enable"
refused "$name is exported by the kernel (nvmet/subsystems/ours/namespaces/1)" "echo 0 > $export/namespaces/1/enable"
echo 0 >"$export/namespaces/1/enable"
# By a name that only a container knows, and that means something else here.
rm -f /tmp/stop
mkdir -p /run/own
ln -s /dev/null /run/own/image
# shellcheck disable=SC2046 # Two words.
unshare -m sh -c "mount -t tmpfs none /run/own; mknod /run/own/image b $(tr : ' ' <"/sys/class/block/$name/dev")
    echo -n /run/own/image >$export/namespaces/1/device_path; echo 1 >$export/namespaces/1/enable
    while [ ! -e /tmp/stop ]; do usleep 100000; done" &
holder=$!
wait_for 20 grep -q 1 "$export/namespaces/1/enable"
refused "$name is exported by the kernel (nvmet/subsystems/ours/namespaces/1)"
touch /tmp/stop
wait "$holder"
echo 0 >"$export/namespaces/1/enable"
rmdir "$export/namespaces/1" "$export"
umount /sys/kernel/config
rmmod nvmet

# A subvolume of a btrfs of two drives: the mount names the other one.
modprobe btrfs
other=$(disk_of S1 1)
/usr/sbin/mkfs.btrfs -q -f -M -d single -m single "$other" "$disk"
mount -t btrfs -o "device=$disk" "$other" /mnt
/usr/bin/btrfs subvolume create /mnt/below
umount /mnt
mount -t btrfs -o "device=$disk,subvol=below" "$other" /mnt
refused "$name is part of the btrfs file system"
umount /mnt
rmmod btrfs

# RAID and LVM.
modprobe raid1
/usr/sbin/mdadm --create /dev/md0 --run --level=1 --metadata=1.0 --raid-devices=2 "$disk" missing
refused "$name is part of the RAID array md0 (raid1)"
/usr/sbin/mdadm --stop /dev/md0
/usr/sbin/mdadm --zero-superblock "$disk"
modprobe dm_mod
lvm() {
    # It complains of descriptors that it does not know.
    /usr/sbin/lvm "$@" 3>&- --config 'devices{use_devicesfile=0} activation{udev_sync=0 udev_rules=0} backup{backup=0 archive=0}'
}
lvm vgcreate -y -ff group "$disk"
lvm lvcreate -y -W n -n volume -L 8M group
refused "$name is part of the logical volume group-volume (LVM)"
lvm vgchange -a n group
lvm vgremove -y -f group
lvm pvremove -y -ff "$disk"

# Programs that have a node open, whatever it is called.
numbers=$(tr : ' ' <"/sys/class/block/$name/dev")
# shellcheck disable=SC2086 # Two words.
mknod /tmp/alias b $numbers
for node in "$disk" "$generic" "$controller" /tmp/alias; do
    hold "$node"
    refused "is open in sleep (pid $holder)" "end sleep (pid $holder)"
    drop
done
dd if=/dev/zero of="$disk" bs=4k oflag=direct 2>/tmp/dd &
holder=$!
wait_for 20 grep -q dd "/proc/$holder/comm"
refused "$disk is open in dd (pid $holder)"
drop

# In a container others are not seen.
fails_with 6 unshare -m -p -f sh -c "mount -t proc proc /proc; nvme-gpu bind $BDF" 2>/tmp/said
says "outside this container"

# Force says what it breaks.
hold "$disk"
nvme-gpu bind --force "$BDF" 2>/tmp/said
says "taken by force: sleep (pid $holder) loses $disk"
[ "$(driver_of "$BDF")" = vfio-pci ] || fail "$BDF was not taken by force"
drop

# A function that is lent, and open.
insmod /kmod/nvme_gpu.ko
nvme-gpu bench --device "vfio:$BDF" --runtime 600s >/tmp/bench 2>&1 &
holder=$!
is_open() {
    ls -l "/proc/$holder/fd" 2>/dev/null | grep -q "/dev/vfio/[0-9]"
}
wait_for 20 is_open
for command in "unbind" "bind --driver nvme_gpu"; do
    # shellcheck disable=SC2086 # Two words.
    fails_with 2 nvme-gpu $command "$BDF" 2>/tmp/said
    says "is open in nvme-gpu (pid $holder)" "or add --force"
done
fails_with 6 nvme-gpu read --device "vfio:$BDF" --blocks 8 --out /dev/null 2>/tmp/said
says "is in use by nvme-gpu (pid $holder)"
kill -9 "$holder"
wait "$holder" || true
wait_for 20 nvme-gpu unbind "$BDF"
rmmod nvme_gpu
wait_for 20 live "$BDF"

# What something else has given to vfio-pci stays there.
echo vfio-pci >"/sys/bus/pci/devices/$BDF/driver_override"
echo "$BDF" >/sys/bus/pci/drivers/nvme/unbind
echo "$BDF" >/sys/bus/pci/drivers_probe
fails_with 2 nvme-gpu unbind "$BDF" 2>/tmp/said
says "by something else than"
[ "$(driver_of "$BDF")" = vfio-pci ] || fail "unbind took a function that bind did not give"
nvme-gpu unbind --force "$BDF"
[ "$(driver_of "$BDF")" = nvme ] || fail "$BDF did not go back"
wait_for 20 live "$BDF"
linux_down
# Aborted with the driver that was taken away by force, and by dd.
dmesg_clean 'Buffer I/O error' 'I/O error, dev nvme' 'lost async page write'
