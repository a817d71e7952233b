# Root is needed for bind only: a user who owns the group does the rest.
modprobe vfio_iommu_type1
modprobe vfio-pci
mkdir -p /etc
echo 'root:x:0:0::/:/bin/sh
reader:x:1000:1000::/:/bin/sh' >/etc/passwd
echo 'root:x:0:
reader:x:1000:' >/etc/group
take "$BDF"
device=vfio:$BDF
as_user() {
    su reader -s /bin/sh -c "$*"
}
fails_with 6 as_user nvme-gpu read --device "$device" --blocks 8 --out /dev/null 2>/tmp/said
cat /tmp/said
grep -q '/dev/vfio/' /tmp/said
nvme-gpu unbind "$BDF"
wait_for 20 live "$BDF"
fails_with 6 as_user nvme-gpu bind "$BDF" 2>/tmp/said
cat /tmp/said
nvme-gpu bind --user reader "$BDF"
head -c 65536 /dev/urandom >/tmp/data
chmod 644 /tmp/data
as_user nvme-gpu write --device "$device" --lba 0 --in /tmp/data --allow-write
as_user nvme-gpu compare --device "$device" --lba 0 --in /tmp/data
# Too little lockable memory is explained.
(
    ulimit -l 64
    fails_with 6 as_user nvme-gpu read --device "$device" --blocks 8 --out /dev/null 2>/tmp/said
)
cat /tmp/said
grep -q -i 'memlock\|ulimit -l\|lock' /tmp/said
leave "$BDF"
dmesg_clean 'RLIMIT_MEMLOCK'
