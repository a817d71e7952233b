# Runs twice: before the reboot it leaves a mark on the disk, after it the mark must be there.
linux_up "$SERIAL"
disk=$(disk_of "$SERIAL" 1)
if [ "$(dd if="$disk" bs=4096 count=1 skip=100 iflag=direct 2>/dev/null | head -c 4)" != MARK ]; then
    (echo MARK; head -c 4091 /dev/zero) >/tmp/mark
    # No flush: what is in the controller's cache must survive an orderly shutdown.
    dd if=/tmp/mark of="$disk" bs=4096 count=1 seek=100 oflag=direct
    reboot -f
    sleep 30
    fail "no reboot"
fi
echo "the mark is there after the reboot"
linux_down
dmesg_clean
