#!/bin/busybox sh
# The guest's first process: runs the tests named in /tests/plan one by one and says how each ended.
/bin/busybox mkdir -p /proc /sys /dev /tmp /run /root /mnt
/bin/busybox --install -s /bin
export PATH=/usr/sbin:/usr/bin HOME=/root
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
echo /usr/bin/modprobe >/proc/sys/kernel/modprobe
mkdir -p /dev/pts /dev/shm
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /tmp
exec </dev/ttyS0 >/dev/ttyS0 2>&1
stty -echo -onlcr

. /tests/plan # TESTS, LIMIT, SHELL

# A guest must end by itself even when nothing is left to kill it.
if [ -n "$LIMIT" ]; then
    (sleep "$LIMIT"; echo "@watchdog"; poweroff -f) &
fi

# What the tests print goes through a pipe: a program on a terminal draws progress bars.
mkfifo /run/out
cat /run/out &
drain=$!
exec 3>&1 >/run/out 2>&1
for test in $TESTS; do
    echo "@test $test"
    if sh -eu /tests/run.sh "$test"; then
        echo "@pass $test"
    else
        echo "@fail $test exit status $?"
        dmesg | tail -n 25
        # The next test finds the machine as this one should have left it.
        umount /mnt 2>/dev/null
        for function in /sys/bus/pci/drivers/vfio-pci/0000:* /sys/bus/pci/drivers/nvme_gpu/0000:*; do
            [ -e "$function" ] && nvme-gpu unbind --force "${function##*/}"
        done
        rmmod nvme 2>/dev/null
    fi
done
echo "@done"
exec >&3 2>&3 3>&-
wait $drain

if [ -n "$SHELL" ]; then
    stty echo onlcr
    echo "Tests are in /tests; run one with: sh -eu /tests/run.sh NAME. Leave with: exit"
    setsid cttyhack sh
fi
sync
poweroff -f
