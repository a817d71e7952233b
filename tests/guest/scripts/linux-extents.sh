# A file system that Linux wrote, with a journal: our reader finds in it what Linux does, also where FIEMAP says.
linux_up "$SERIAL"
disk=$(disk_of "$SERIAL" 1)
modprobe ext4
uuid=d9d4b3f0-5a0e-4c36-9d1c-0a2b4c6d8e9f
/usr/sbin/mke2fs -q -t ext4 -U $uuid "$disk"
mount -t ext4 "$disk" /mnt
mkdir -p /mnt/deep/er /mnt/gone
for size in 0 1 59 160 4096 65537 1000000 20000000; do
    head -c $size /dev/urandom >/mnt/deep/er/$size
done
# Two files that grow in turns, one of which goes: what comes then lies in pieces.
for _turn in $(seq 80); do
    head -c 8192 /dev/urandom >>/mnt/deep/pieces
    head -c 8192 /dev/urandom >>/mnt/gone/other
    sync
done
rm -r /mnt/gone
head -c 3000000 /dev/urandom >/mnt/later
# Holes, an end that moved both ways, a name and a folder that moved, a file that is open when its name goes.
dd if=/dev/urandom of=/mnt/sparse bs=4096 count=3 seek=1000 conv=notrunc 2>/dev/null
dd if=/dev/urandom of=/mnt/sparse bs=4096 count=3 seek=10 conv=notrunc 2>/dev/null
truncate -s 6000000 /mnt/sparse
cp /mnt/deep/er/1000000 /mnt/cut
truncate -s 70001 /mnt/cut
truncate -s 500000 /mnt/cut
mv /mnt/deep/er/65537 /mnt/renamed
mv /mnt/deep /mnt/moved
ln -s moved/er/4096 /mnt/link
ln /mnt/renamed /mnt/moved/again
exec 9</mnt/later
rm /mnt/later
for name in $(seq 240); do
    echo "$name" >"/mnt/moved/er/a-name-of-one-file-of-many-$name"
done
for name in $(seq 1 3 240); do
    rm "/mnt/moved/er/a-name-of-one-file-of-many-$name"
done
exec 9<&-

# Where FIEMAP says, while it is mounted.
fails_with 2 nvme-gpu stat /mnt/moved/pieces
for name in moved/pieces sparse cut renamed; do
    chattr +i "/mnt/$name"
    nvme-gpu stat --json "/mnt/$name" >"/tmp/$(basename "$name").mounted"
done
fallocate -l 100000 /mnt/unwritten
chattr +i /mnt/unwritten
fails_with 2 nvme-gpu stat /mnt/unwritten
chattr -i /mnt/unwritten
rm /mnt/unwritten
(cd /mnt && find . -type f -exec md5sum '{}' + | sort >/tmp/sums)
[ "$(wc -l </tmp/sums)" -gt 160 ] || fail "too few files are compared"

# Not while its journal is in use.
fails_with 2 nvme-gpu ls "file:$disk:/"
umount /mnt
/usr/sbin/e2fsck -f -n "$disk"
nvme-gpu cp -r "file:$disk:/" /tmp/copy
(cd /tmp/copy && find . -type f -exec md5sum '{}' + | sort >/tmp/sums.copy)
cmp /tmp/sums /tmp/sums.copy
[ "$(readlink /tmp/copy/link)" = moved/er/4096 ] || fail "the link leads elsewhere"

# Logical bytes, places and lengths of extents, a line each; those of the reader that are written.
extents() {
    sed 's/.*"extents"://' "$1" | grep -o '{[^}]*}' | grep -v '"written":false' |
        sed 's/.*"logical":\([0-9]*\).*"place":\([0-9]*\).*"bytes":\([0-9]*\).*/\1 \2 \3/'
}
for name in moved/pieces sparse cut renamed; do
    base=$(basename "$name")
    nvme-gpu stat --json "file:$disk:/$name" >"/tmp/$base.read"
    extents "/tmp/$base.mounted" >"/tmp/$base.by-fiemap"
    extents "/tmp/$base.read" >"/tmp/$base.by-reader"
    cmp "/tmp/$base.by-fiemap" "/tmp/$base.by-reader"
    [ -s "/tmp/$base.by-fiemap" ] || fail "$name has no extents"
    for member in inode generation bytes; do
        grep -o "\"$member\":[0-9]*" "/tmp/$base.mounted" | head -n 1 >/tmp/one
        grep -o "\"$member\":[0-9]*" "/tmp/$base.read" | head -n 1 >/tmp/other
        cmp /tmp/one /tmp/other
    done
    grep -q '"immutable"' "/tmp/$base.read" || fail "$name is not immutable"
done
[ "$(wc -l </tmp/pieces.by-fiemap)" -gt 20 ] || fail "a file that grew beside another lies in few pieces"
[ "$(wc -l </tmp/sparse.by-fiemap)" -ge 2 ] || fail "a file with holes lies in one piece"
grep -q "\"uuid\":\"$uuid\"" /tmp/sparse.mounted || fail "another UUID than $uuid"
linux_down
dmesg_clean
