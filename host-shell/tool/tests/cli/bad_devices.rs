//! Devices, namespaces and ranges that are not there.

use super::rows::check;

#[test]
fn control_characters_of_arguments_and_paths_are_written_out() {
    check(
        "
        2 | \x1b[31mred | \\u{1b}[31mred
        2 | read -d \x1b]0;title\x07 | \\u{1b}]0;title\\u{7}
        2 | read -d sim:disk.img --lba 1{LF}2 | 1\\u{a}2
        4 | write -d sim:disk.img -i a\x1b[2Jb{LF} | a\\u{1b}[2Jb\\u{a}
        4 | read -d sim:a\u{9b}2J.img | a\\u{9b}2J.img
        4 | read -d sim:\u{202e}gmi.img | \\u{202e}gmi.img
        4 | read -d sim:disk.img -o no/\r/x | no/\\u{d}/x
        2 | read -d sim:disk.img --\u{7f} | \\u{7f}
        2 | bench -d sim:disk.img --plot a\x1b.gif | a\\u{1b}.gif
    ",
    );
}

#[test]
fn devices_that_are_none_say_which_there_are() {
    let long = format!("sim:{}", "x".repeat(300));
    let socket = format!("vfio-user:{}", "x".repeat(120));
    check(
        &"
        2 | read -d '' | write sim:PATH
        2 | read -d disk.img | names no device
        2 | read -d usb:1 | unknown kind
        2 | read -d SIM:mem | unknown kind
        2 | read -d kmod:x | not a PCI address
        2 | read -d sim: | path
        4 | read -d sim:missing.img | No such file
        4 | read -d sim:folder/missing.img | No such file
        4 | read -d sim:disk.img/x | disk.img/x
        4 | read -d sim:folder | name a file, not a folder
        4 | read -d sim:loop | loop
        4 | read -d sim:dangling | dangling
        4 | read -d LONG | shorter path
        2 | read -d sim:odd | multiple of
        2 | read -d sim:empty | truncate -s 1GiB
        2 | read -d sim:mem?size=12x | size
        2 | read -d sim:mem?size=+4096 | size
        2 | read -d sim:mem?size=4097 | size
        2 | read -d sim:mem?size=0 | size
        2 | read -d sim:mem?block=100 | block
        2 | read -d sim:mem?colour=red | colour
        2 | read -d sim:mem?queues | queues
        2 | read -d sim:mem?threads=0 | option threads
        2 | read -d sim:mem?threads=+1 | option threads
        2 | read -d sim:mem?threads=65 | option threads
        2 | read -d sim:mem?ns=0 | ns
        2 | read -d sim:mem?ready=5 | no unit
        2 | read -d sim:mem?fault=delay:5 | no unit
        2 | read -d sim:mem?fault=explode | explode
        2 | read -d sim:disk.img?size=1MiB | exists and has
        4 | read -d vfio-user:nowhere | nowhere
        4 | read -d vfio-user:disk.img | start the server
        4 | read -d vfio-user:folder | folder
        2 | read -d vfio-user: | names no socket
        4 | read -d LONGSOCKET | shorter path
        2 | serve -d vfio-user:x -s cntrl | cannot be served
        2 | serve -d sim:disk.img -s in | not a socket
        2 | serve -d sim:disk.img -s folder | not a socket
        2 | serve -d sim:disk.img -s no/cntrl | make the folder first
        4 | serve -d sim:missing.img -s cntrl | missing.img
        2 | serve -d sim:new.img?size=1MiB -s no/cntrl | folder first
    "
        .replace("LONGSOCKET", &socket)
        .replace("LONG", &long),
    );
    if cfg!(feature = "vfio") {
        check(
            "
            2 | read -d vfio: | not a PCI address
            2 | read -d vfio:x | not a PCI address
            6 | read -d vfio:ffff:ff:1f.7 | no PCI function
            2 | bind x | not a PCI address
            6 | bind ffff:ff:1f.7 | no PCI function
            2 | unbind ffff:ff:1f.8 | not a PCI address
        ",
        );
    }
}

#[test]
fn ranges_and_namespaces_that_are_not_there() {
    check(
        "
        2 | read -d sim:disk.img --lba 16 | the last LBA is 15
        2 | read -d sim:disk.img --lba 18446744073709551615 | the last LBA is 15
        2 | read -d sim:disk.img --blocks 0 | no blocks
        2 | read -d sim:disk.img --blocks 17 | the last LBA is 15
        2 | read -d sim:disk.img --blocks 18446744073709551615 | the last LBA is 15
        2 | read -d sim:disk.img -n 2 | no namespace 2
        2 | write -d sim:disk.img -i long | the last LBA is 15
        2 | write -d sim:disk.img -i in --lba 15 | the last LBA is 15
        2 | write -d sim:disk.img -i in --lba 18446744073709551615 | past namespace 1
        2 | write -d sim:disk.img -i in --blocks 3 | 2 blocks, not 3
        2 | write -d sim:disk.img -i in -n 9 | no namespace 9
        2 | compare -d sim:disk.img -i long | the last LBA is 15
        2 | compare -d sim:disk.img -i in --blocks 1 | 2 blocks, not 1
        2 | compare -d sim:disk.img -i /dev/zero | --blocks
        2 | compare -d sim:disk.img -i /dev/zero -b 17 | the last LBA is 15
        2 | write-zeroes -d sim:disk.img -s 15 -b 2 | the last LBA is 15
        2 | write-zeroes -d sim:disk.img -s 0 -b 0 | no blocks
        2 | dsm -d sim:disk.img --ad -s 1,2 -b 1 | 2 starts
        2 | dsm -d sim:disk.img --ad -s 16 -b 1 | the last LBA is 15
        2 | dsm -d sim:disk.img --ad -s 1, -b 1,1 | --slbs
        2 | dsm -d sim:disk.img -s 1 -b 1 | add --deallocate
        2 | smart-log -d sim:disk.img -n 99 | no namespace 99
        2 | smart-log -d sim:disk.img -n 1 | one SMART log
        2 | get-feature -d sim:disk.img -f 5 -n 99 | no namespace 99
        2 | get-feature -d sim:disk.img -f 0 | no feature 0x0
        2 | get-feature -d sim:disk.img -f 0x100 | no feature 0x100
        2 | get-feature -d sim:disk.img -f 7 --cdw11 0x100000000 | 32 bits
        2 | set-feature -d sim:disk.img -f 6 --value 0x100000000 | 32 bits
        2 | set-feature -d sim:disk.img -f 7 --value 1 | set by the driver
        2 | set-feature -d sim:disk.img -f 5 --value 0 -n 5 | no namespace 5
        2 | flush -d sim:disk.img -n 2 | no namespace 2
        2 | identify ns -d sim:disk.img -n 2 | no namespace 2
        2 | bench -d sim:disk.img --size 1MiB --io-size 4k | use at most 65536
        2 | bench -d sim:disk.img --size 1 --io-size 4k | less than one command
        2 | bench -d sim:disk.img --bs 8GiB | too large
        2 | bench -d sim:disk.img --bs 1MiB --io-size 1MiB | --bs
        2 | bench -d sim:disk.img --bs 1000 --io-size 4k | block
        2 | bench -d sim:disk.img -n 2 --io-size 4k | no namespace 2
        2 | bench -d sim:disk.img --plot a.gif | neither .svg nor .png
        4 | bench -d sim:disk.img --plot no/a.svg | no/a.svg
        2 | stream -d sim:disk.img --lba 1 | --lba 1 needs --gpu
        2 | demo --size 4097 | 4096
        4 | demo --size 99TiB | do not fit into
        2 | demo --block 1000 | 512 or 4096
        2 | demo --bs 1 | less than a block
        4 | demo --image disk.img --size 1MiB --cpu | exists
        4 | demo --image no/x.img --size 1MiB --cpu | no/x.img
        2 | p2p -d sim:disk.img --peer in --size 99TiB | the last LBA is 15
        2 | p2p -d sim:disk.img --peer in --size 5000 | whole pages
        4 | p2p -d sim:disk.img --peer missing --size 4096 | missing
        2 | read -d sim:disk.img --irq | leave --irq out
    ",
    );
}
