# A file system on the disk: files survive a remount, and fsck finds nothing.
linux_up "$SERIAL"
disk=$(disk_of "$SERIAL" 1)
modprobe ext4
/usr/sbin/mke2fs -q -t ext4 "$disk"
mount -t ext4 "$disk" /mnt
mkdir /mnt/deep /mnt/deep/er
for size in 1 511 4096 65537 1000000 20000000; do
    head -c $size /dev/urandom >/mnt/deep/er/$size
done
cp -r /usr/lib/modules /mnt/
(cd /mnt && find . -type f -exec sha256sum '{}' + | sort >/tmp/sums)
umount /mnt
echo 3 >/proc/sys/vm/drop_caches
/usr/sbin/e2fsck -f -n "$disk"
mount -t ext4 "$disk" /mnt
(cd /mnt && find . -type f -exec sha256sum '{}' + | sort >/tmp/sums.again)
cmp /tmp/sums /tmp/sums.again
[ "$(wc -l </tmp/sums)" -gt 10 ] || fail "too few files were compared"
rm -r /mnt/modules
fstrim /mnt || true
umount /mnt
/usr/sbin/e2fsck -f -n "$disk"
linux_down
dmesg_clean
