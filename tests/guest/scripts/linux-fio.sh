# fio writes with checksums and reads them back: block sizes, jobs and depths.
linux_up "$SERIAL"
disk=$(disk_of "$SERIAL" 1)
verify() {
    # name, block size, jobs, depth, MiB for each job
    fio --name="$1" --filename="$disk" --direct=1 --ioengine=libaio --rw=randwrite --verify=crc32c \
        --verify_fatal=1 --do_verify=1 --bs="$2" --numjobs="$3" --iodepth="$4" --size="$5M" \
        --offset_increment="$5M" --group_reporting --output-format=terse --terse-version=3 |
        cut -d';' -f3,5,6,8,47,49 | sed "s/^/$1: /"
}
verify one-block 512 1 1 1
verify small 4k 4 16 2
verify odd 7k 2 8 4
verify mixed 512-64k 3 32 4
verify large 128k 2 16 12
verify huge 1m 2 4 16
verify deep 4k 1 256 4
linux_down
dmesg_clean
