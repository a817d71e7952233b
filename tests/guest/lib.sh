# Helpers for the test files. A test fails by any command that fails (sh -e), or by `fail`.

fail() {
    echo "FAILED: $*"
    exit 1
}

# Waits up to $1 seconds (on a slow kernel PATIENCE times as many) until the rest of the line succeeds.
wait_for() {
    _seconds=$(($1 * ${PATIENCE:-1}))
    shift
    _left=$((_seconds * 10))
    until "$@" >/dev/null 2>&1; do
        _left=$((_left - 1))
        [ "$_left" -gt 0 ] || fail "not within $_seconds s: $*"
        usleep 100000
    done
}

# Succeeds when the command fails with exit status $1.
fails_with() {
    _want=$1
    shift
    _got=0
    "$@" || _got=$?
    [ "$_got" = "$_want" ] || fail "exit status $_got instead of $_want: $*"
}

# The PCI address of the NVMe controllers, in bus order.
nvme_functions() {
    grep -l 0x010802 /sys/bus/pci/devices/*/class | cut -d/ -f6
}

# The name (nvme0) of the controller with serial number $1. Linux numbers them as they come.
controller_of() {
    for _dir in /sys/class/nvme/*; do
        if [ "$(tr -d ' ' <"$_dir/serial")" = "$1" ]; then
            basename "$_dir"
            return
        fi
    done
    return 1
}

# The block device (/dev/nvme0n1) of namespace $2 of the controller with serial number $1.
disk_of() {
    _controller=$(controller_of "$1")
    for _dir in "/sys/class/nvme/$_controller/$_controller"n* "/sys/class/nvme-subsystem/"*/nvme*n*; do
        [ -e "$_dir/nsid" ] || continue
        [ "$(cat "$_dir/nsid")" = "$2" ] || continue
        basename "$_dir" | sed 's/c[0-9]*n/n/; s#^#/dev/#'
        return
    done
    return 1
}

# Loads Linux's driver with the given parameters and waits for a disk with serial number $1.
linux_up() {
    _serial=$1
    shift
    modprobe nvme "$@"
    wait_for 20 disk_of "$_serial" 1
    _disk=$(disk_of "$_serial" 1)
    [ ! -f "$_disk" ] || fail "$_disk is a regular file: a test wrote to it while it had no node"
    wait_for 20 test -b "$_disk"
}

linux_down() {
    rmmod nvme
    [ ! -d /sys/class/nvme/nvme0 ] || fail "a controller is left after rmmod nvme"
}

# Nothing at warning level or worse since the test began: of nvme, the block layer, the IOMMU, or the
# kernel itself. Arguments are extended regular expressions of lines that the test provokes.
dmesg_clean() {
    _allow='^$|nvme_gpu: (loading out-of-tree module|module verification failed)'
    # Linux 7.3 warns of each reset of a function, also of those that a driver asks for.
    _allow="$_allow|0000:[0-9a-f:.]+: (resetting|reset done)\$"
    for _pattern in "$@"; do
        _allow="$_allow|$_pattern"
    done
    dmesg -r | grep -E '^<[0-4]>' | grep -E -i 'nvme|I/O error|Buffer I/O|DMAR|EXT4|vfio|WARNING|BUG:|[^a-z]BUG [a-z]|Oops|blocked for more|soft lockup|rcu.*stall|irq .*nobody' |
        grep -v -E "$_allow" >/tmp/dmesg.bad || return 0
    cat /tmp/dmesg.bad
    fail "the kernel complained"
}

# What lends functions to our driver, and how our driver names the function $BDF then: the boot may choose.
LENDER=${LENDER:-vfio-pci}
DEVICE=${DEVICE:-vfio:${BDF:-}}

# Loads the lender.
lender_up() {
    case $LENDER in
    vfio-pci)
        modprobe vfio_iommu_type1
        modprobe vfio-pci
        ;;
    nvme_gpu)
        [ -d /sys/module/nvme_gpu ] || insmod /kmod/nvme_gpu.ko
        ;;
    esac
}

# Gives the function $1 to the lender by our tool, taking it away from Linux's driver.
take() {
    modprobe nvme
    wait_for 20 test -d "/sys/bus/pci/devices/$1/driver"
    wait_for 20 live "$1"
    nvme-gpu bind --driver "$LENDER" "$1"
    [ "$(driver_of "$1")" = "$LENDER" ] || fail "$1 is not bound to $LENDER"
}

# Linux's driver has finished with the start of the function $1.
live() {
    grep -q live "/sys/bus/pci/devices/$1/nvme/"*/state
}

# Gives functions back to Linux's driver, and then takes the driver away.
leave() {
    for _function in "$@"; do
        nvme-gpu unbind "$_function"
        [ "$(driver_of "$_function")" = nvme ] || fail "$_function did not go back to nvme"
        wait_for 20 live "$_function"
    done
    linux_down
}

# Gives the function $1 back to Linux's driver and waits for the disk with serial number $2.
give_back() {
    nvme-gpu unbind "$1"
    wait_for 20 disk_of "$2" 1
    wait_for 20 test -b "$(disk_of "$2" 1)"
}

driver_of() {
    basename "$(readlink "/sys/bus/pci/devices/$1/driver")"
}
