#!/bin/sh
set -e

case "$1" in
remove | upgrade | deconfigure)
    if [ -n "$(dkms status nvme-gpu/@VERSION@)" ]; then
        dkms remove nvme-gpu/@VERSION@ --all
    fi
    ;;
esac
