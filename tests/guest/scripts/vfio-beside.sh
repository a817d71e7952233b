# Two controllers of one subsystem: Linux has mounted the namespace `ro,noload` by one, our driver reads it by the other.
lender_up
modprobe nvme
wait_for 20 live "$FIRST"
wait_for 20 live "$SECOND"
wait_for 20 disk_of S1 1
disk=$(disk_of S1 1)
wait_for 20 test -b "$disk"
modprobe ext4
/usr/sbin/mke2fs -q -t ext4 "$disk"
mount -t ext4 "$disk" /mnt
mkdir -p /mnt/models/a
for size in 1 160 65537 1000000 30000000; do
    head -c $size /dev/urandom >/mnt/models/a/$size
done
for name in $(seq 50); do
    head -c 5000 /dev/urandom >"/mnt/models/small-$name"
done
sync
# Neither controller of a mounted namespace is taken away from Linux.
fails_with 2 nvme-gpu bind --driver "$LENDER" "$SECOND"
umount /mnt
take "$SECOND"
# With the file system in use our reader refuses it: its journal may hold what is not at its place yet.
mount -t ext4 "$disk" /mnt
echo more >/mnt/models/more
sync
fails_with 1 nvme-gpu ls "vfio:$SECOND:/"
umount /mnt
/usr/sbin/e2fsck -f -n "$disk"

mount -t ext4 -o ro,noload "$disk" /mnt
(cd /mnt && find . -type f -exec md5sum '{}' + | sort >/tmp/sums)
[ "$(wc -l </tmp/sums)" = 56 ] || fail "$(wc -l </tmp/sums) files are compared"
# Both at a time: Linux reads again what it has cached no more, three times.
(
    for _turn in 1 2 3; do
        echo 3 >/proc/sys/vm/drop_caches
        (cd /mnt && find . -type f -exec md5sum '{}' + | sort | cmp - /tmp/sums) || exit 1
    done
    echo all >/tmp/linux.read
) &
reader=$!
for turn in 1 2 3; do
    nvme-gpu cp -r "vfio:$SECOND:/" "/tmp/copy$turn"
    (cd "/tmp/copy$turn" && find . -type f -exec md5sum '{}' + | sort | cmp - /tmp/sums)
done
nvme-gpu cat "vfio:$SECOND:/models/a/1000000" | cmp - /mnt/models/a/1000000
wait "$reader"
[ "$(cat /tmp/linux.read)" = all ] || fail "Linux did not read all"
# A command of one that is read only changes nothing for the other.
[ "$(driver_of "$FIRST")" = nvme ] || fail "Linux lost its controller"
umount /mnt
/usr/sbin/e2fsck -f -n "$disk"
nvme-gpu unbind "$SECOND"
wait_for 20 live "$SECOND"
linux_down
dmesg_clean
