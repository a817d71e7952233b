//! Numbers, sizes, times and words that are none, at every option.

use super::rows::check;

/// Command lines that are right, and their options with a number.
const NUMBERS: &str = "
    read -d sim:disk.img | lba blocks namespace-id timeout-ms
    write -d sim:disk.img -i in | lba blocks namespace-id timeout-ms
    compare -d sim:disk.img -i in | lba blocks
    write-zeroes -d sim:disk.img --blocks=1 | lba
    write-zeroes -d sim:disk.img --lba=1 | blocks
    dsm -d sim:disk.img --ad --blocks=1 | slbs
    dsm -d sim:disk.img --ad --slbs=1 | blocks
    smart-log -d sim:disk.img | namespace-id
    error-log -d sim:disk.img | log-entries
    get-feature -d sim:disk.img --feature-id=7 | cdw11
    set-feature -d sim:disk.img --feature-id=6 | value
    bench -d sim:disk.img | queues depth rwmixread rate-iops seed
    stream -d sim:disk.img | lba queues depth
    demo | queues depth block sim-threads seed
    serve -d sim:disk.img -s cntrl | threads
    p2p -d sim:disk.img --peer in | lba
";

const SIZES: &str = "
    bench -d sim:disk.img | bs io-size size
    stream -d sim:disk.img | size bytes
    demo | size bs
    p2p -d sim:disk.img --peer in | size
";

const TIMES: &str = "
    bench -d sim:disk.img | runtime recover
    demo | timeout
";

/// Checks that every option of `table` refuses every one of `values`, and that the error names the
/// option.
fn check_values(table: &str, values: &[&str]) {
    let mut rows = String::new();
    for line in table.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (base, options) = line.split_once(" | ").unwrap();
        for option in options.split(' ') {
            for value in values {
                rows.push_str(&format!("2 | {base} --{option}={value} | --{option}\n"));
            }
        }
    }
    check(&rows);
}

#[test]
fn numbers_that_are_none_are_refused_at_every_option() {
    check_values(
        NUMBERS,
        &[
            "",
            "+1",
            "-1",
            "1.5",
            "1e3",
            "x",
            "0x",
            "0x+1",
            "1_000",
            "99999999999999999999",
            "٣",
        ],
    );
}

#[test]
fn sizes_that_are_none_are_refused_at_every_option() {
    check_values(
        SIZES,
        &[
            "",
            "0",
            "+4096",
            "-1",
            "1.5G",
            "4x",
            "KiB",
            "0x",
            "0x1000KiB",
            "99999999999999999999",
            "16777216TiB",
            "４",
        ],
    );
}

#[test]
fn times_that_are_none_are_refused_at_every_option() {
    check_values(
        TIMES,
        &[
            "",
            "0",
            "0s",
            "5",
            "+5s",
            "-5s",
            "1h",
            "1e3s",
            "s",
            "1..5s",
            "99999999999s",
        ],
    );
}

#[test]
fn command_lines_that_clap_refuses_name_what_was_meant() {
    check(
        "
        2 | fly | no command 'fly': see `nvme-gpu --help`
        2 | reed | did you mean 'read'?
        2 | identfy | did you mean 'identify'?
        2 | '' | no command ''
        2 | READ | no command 'READ'
        2 | identify | see `nvme-gpu identify --help`
        2 | identify ctlr -d sim:disk.img | did you mean 'ctrl'?
        2 | identify ns | missing: --device
        2 | read | missing: --device <DEVICE>: see `nvme-gpu read --help`
        2 | write -d sim:disk.img | --in <FILE>
        2 | dsm -d sim:disk.img --ad | --slbs
        2 | read -d | --device
        2 | read -d sim:disk.img --colour | unexpected argument '--colour'
        2 | read -d sim:disk.img --block 1 | did you mean '--blocks'?
        2 | read -d sim:disk.img --jsn | did you mean '--json'?
        2 | read -d sim:disk.img -Z | '-Z'
        2 | read -d sim:disk.img extra | unexpected argument 'extra'
        2 | bench -d sim:disk.img --rw randred | did you mean 'randread'?
        2 | bench -d sim:disk.img --rw ? | possible values: read, write
        2 | bench -d sim:disk.img --rw= | possible values: read, write
        2 | read -d sim:disk.img --rings gpu | possible values: host, cmb
        2 | read -d sim:disk.img --doorbells x | possible values: direct, relay
        2 | get-feature -d sim:disk.img -f 7 -s 9 | possible values: current
        2 | read -d sim:disk.img --lba 1 --lba 2 | given more than once
        2 | read -d sim:disk.img -d sim:mem | given more than once
        2 | read -d sim:disk.img --irq --irq | given more than once
        2 | bench -d sim:disk.img --irq=1 | unexpected value '1'
        2 | bench -d sim:disk.img --runtime 1s --io-size 4k | does not go with
        2 | bench -d sim:disk.img --ramp 1:2:3 --rate-iops 9 | does not go with
        2 | demo -d sim:mem --keep | does not go with
        2 | bench -d sim:disk.img --ramp 1:2 | FROM:TO:STEPS
        2 | bench -d sim:disk.img --ramp 0:2:3 | not in the range
        2 | bench -d sim:disk.img --ramp 1:x:3 | whole number
        2 | bench -d sim:disk.img --ramp 1:2:1001 | not in the range
        2 | bench -d sim:disk.img --ramp +1:2:3 | whole number
        2 | read -d sim:disk.img --timeout-ms 0 | 1 to 3600000
        2 | read -d sim:disk.img --timeout-ms 3600001 | 1 to 3600000
        2 | read -d sim:disk.img -n 0 | not in the range
        2 | read -d sim:disk.img -n 0xffffffff | not in the range
        2 | bench -d sim:disk.img --depth 0 | not in the range
        2 | bench -d sim:disk.img --queues 4097 | 1 to 4096
        2 | bench -d sim:disk.img --rwmixread 101 | 0 to 100
        2 | bench -d sim:disk.img --rate-iops 0 | not in the range
        2 | error-log -d sim:disk.img -e 0 | not in the range
    ",
    );
}
