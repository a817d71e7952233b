#!/bin/sh
set -e

if [ "$1" = configure ]; then
    /usr/lib/dkms/common.postinst nvme-gpu @VERSION@ /usr/share/nvme-gpu-dkms "" "$2"
    # Without udev, as in a container, there is nothing that could read the rule again.
    if [ -e /run/udev/control ]; then
        udevadm control --reload || true
    fi
fi
