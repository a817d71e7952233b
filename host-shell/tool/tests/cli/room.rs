//! Commands that write more than there is room for: known before the first byte is written.

use crate::rows::check;

#[test]
fn what_has_no_room_is_refused_before_anything_is_written() {
    // The image has 64 KiB; no row of the table changes it.
    check(
        "\
        2 | bench -d sim:disk.img --gather | the table needs 1073741824 bytes from byte 0 on
        2 | bench -d sim:disk.img --gather --table 68KiB | the table needs 69632 bytes from byte 0 on
        2 | bench -d sim:disk.img --gather --table 32KiB --row 64KiB | a row of 65536 bytes does not lie in a table
        2 | bench -d sim:disk.img --gather --table 32KiB --row 4KiB,64KiB | a row of 65536 bytes does not lie in a table
        2 | bench -d sim:disk.img --gather --table 32KiB --size 8KiB | does not go with
        2 | bench -d sim:disk.img --gather --table 32KiB --verify | does not go with
        2 | bench -d sim:disk.img --gather --table 32KiB --rw read | does not go with
        2 | bench -d sim:disk.img --rw write --size 68KiB --io-size 4KiB | 69632
        2 | write -d sim:disk.img --lba 0 --in long | 17 blocks
        2 | write -d sim:disk.img --lba 15 --in in | namespace
        2 | write-zeroes -d sim:disk.img --lba 0 --blocks 17 | namespace
        2 | import long -d sim:disk.img | needs 69632 bytes from byte 0 on
        2 | import in -d sim:disk.img --offset 60KiB | needs 8192 bytes from byte 61440 on
        2 | search build -o sim:disk.img --count 1000 --dim 64 | an index of
        2 | pipeline streamed-batch-processing -d sim:disk.img --columns 256 --rows 256 | on a drive of 65536 bytes",
    );
}
