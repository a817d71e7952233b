# Leaves a mark without a flush; the machine is shut down next, and the host looks for it in the image.
linux_up "$SERIAL"
(echo LAST; head -c 4091 /dev/zero) >/tmp/mark
dd if=/tmp/mark of="$(disk_of "$SERIAL" 1)" bs=4096 count=1 seek=200 oflag=direct
dmesg_clean
