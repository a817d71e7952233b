//! Inputs and outputs that cannot be used, and the files that a failed command leaves.

use super::rows::{check, fault, folder, shell, words};
use crate::common::{Folder, Place, bytes};
use std::fs::File;

const BLOCK: usize = 4096;

#[test]
fn inputs_and_outputs_that_cannot_be_used() {
    check(
        "
        2 | read -d sim:disk.img -o disk.img | which would be written over
        2 | read -d sim:disk.img -o ./folder/../disk.img | which would be written over
        2 | read -d sim:disk.img -o link | which would be written over
        2 | read -d sim:disk.img -o hard | which would be written over
        2 | read -d sim:link -o hard | which would be written over
        2 | bench -d sim:disk.img --plot disk.img | which would be written over
        2 | bench -d sim:disk.img --plot other.img | neither .svg
        4 | read -d sim:disk.img -o folder | not a folder
        4 | read -d sim:disk.img -o . | not a folder
        4 | read -d sim:disk.img -o / | not a folder
        4 | read -d sim:disk.img -o no/such | check the path
        4 | read -d sim:disk.img -o in/x | in/x
        2 | read -d sim:disk.img -o '' | --out
        4 | read -d sim:disk.img -o /dev/full | free space
        4 | read -d sim:disk.img -o /proc/version | /proc/version
    ",
    );
    let both = "
        2 | VERB -d sim:disk.img -i disk.img | the image of the device itself
        2 | VERB -d sim:disk.img -i link | the image of the device itself
        2 | VERB -d sim:disk.img -i hard | the image of the device itself
        2 | VERB -d sim:disk.img -i odd | whole number of 4096-byte blocks
        2 | VERB -d sim:disk.img -i empty | at least one block of data
        4 | VERB -d sim:disk.img -i missing | missing
        2 | VERB -d sim:disk.img -i '' | --in
        4 | VERB -d sim:disk.img -i folder | not a folder
        4 | VERB -d sim:disk.img -i loop | circle
        4 | VERB -d sim:disk.img -i dangling | check the path
        4 | VERB -d sim:disk.img -i in/x | not a folder
        2 | VERB -d sim:disk.img -i /dev/null | --blocks
        2 | VERB -d sim:disk.img -i /dev/null -b 1 | ended after 0 bytes
        2 | VERB -d sim:disk.img -i /dev/zero | --blocks
        2 | VERB -d sim:disk.img -i - | --blocks
        4 | VERB -d sim:new.img -i in | new.img
        4 | VERB -d sim:new.img?size=1MiB -i missing | missing
    ";
    for verb in ["write", "compare"] {
        check(&both.replace("VERB", verb));
    }
}

/// Outputs of the end are looked at before anything else, as the device that is not there shows: the work would be lost.
#[test]
fn outputs_that_cannot_be_made_are_known_before_the_work() {
    check(
        "
        4 | bench -d sim:missing --plot no/such.svg | no/such.svg
        4 | bench -d sim:missing --gather --plot no/such.svg | no/such.svg
        4 | pipeline streamed-batch-processing -d sim:missing --trace no/such.json | no/such.json
        4 | pipeline streamed-batch-processing -d sim:missing --plot no/such.svg | no/such.svg
        2 | pipeline streamed-batch-processing -d sim:missing --plot x.svg --trace ./x.svg | would be written over
        4 | generate missing.gguf -p x --logits no/such.npy | no/such.npy
        4 | generate missing.gguf -p x --logits folder | not a folder
        2 | generate missing.gguf -p x --logits - | name a file
        4 | search query -d sim:missing --out-ids no/such.npy | no/such.npy
        4 | search query -d sim:missing --out-distances no/such.npy | no/such.npy
        2 | search query -d sim:missing --out-ids x --out-distances ./x | would be written over
        2 | search query -d sim:missing --out-ids disk.img --out-distances link | would be written over
        2 | pack folder folder/image | packed into itself
        2 | pack . image | packed into itself
        2 | generate '' -p x | no value for
        2 | catalog '' | no value for
        2 | manifest '' --out x | no value for
    ",
    );
}

/// A command that fails leaves no image, and one that only reads does not make one.
#[test]
fn no_command_that_fails_or_reads_leaves_an_image() {
    check(
        "
        4 | read -d sim:new.img?size=64KiB | No such file
        4 | compare -d sim:new.img?size=64KiB -i in | No such file
        4 | identify ctrl -d sim:new.img?size=64KiB | No such file
        4 | identify ns -d sim:new.img?size=64KiB | No such file
        4 | list-ns -d sim:new.img?size=64KiB | No such file
        4 | smart-log -d sim:new.img?size=64KiB | No such file
        4 | error-log -d sim:new.img?size=64KiB | No such file
        4 | get-feature -d sim:new.img?size=64KiB -f 7 | No such file
        4 | flush -d sim:new.img?size=64KiB | No such file
        4 | regs -d sim:new.img?size=64KiB | No such file
        4 | regs --raw -d sim:new.img?size=64KiB | No such file
        4 | reset -d sim:new.img?size=64KiB | No such file
        4 | admin-passthru -d sim:new.img?size=64KiB -O 6 -l 4096 --cdw10 1 | No such file
        1 | io-passthru -d sim:new.img?size=64KiB -O 0x7f | Invalid Command Opcode
        4 | stream -d sim:new.img?size=64KiB | No such file
        4 | bench -d sim:new.img?size=64KiB --io-size 4k | No such file
        4 | p2p -d sim:new.img?size=64KiB --peer in | No such file
        2 | write -d sim:new.img?size=64KiB -i odd | whole number
        2 | write -d sim:new.img?size=64KiB -i long | the last LBA is 15
        2 | write -d sim:new.img?size=64KiB -i in --lba 15 | the last LBA is 15
        2 | write -d sim:new.img?size=64KiB -i in -b 1 | 2 blocks, not 1
        2 | write -d sim:new.img?size=64KiB -i in -n 2 | no namespace 2
        2 | write -d sim:new.img?size=64KiB -i in --irq | leave --irq out
        2 | write-zeroes -d sim:new.img?size=64KiB -s 16 -b 1 | the last LBA is 15
        2 | dsm -d sim:new.img?size=64KiB --ad -s 16 -b 1 | the last LBA is 15
        2 | bench -d sim:new.img?size=64KiB --rw write --size 1MiB | use at most 65536
        2 | bench -d sim:new.img?size=64KiB --rw write --bs 1MiB | --bs
        2 | set-feature -d sim:new.img?size=64KiB -f 5 --value 0 -n 5 | no namespace 5
        2 | demo -d sim:new.img?size=64KiB --size 1MiB | past namespace 1
        2 | write -d sim:new.img?size=64KiB&ns=3 -i in -n 4 | no namespace 4
        1 | write -d sim:new.img?size=64KiB&fault=status:0x281@op=write -i in | 0x0281
        1 | write -d sim:folder/new.img?size=64KiB&fault=cfs@op=identify -i in | CSTS.CFS
    ",
    );
}

/// The result's line is the least of what was done: the image, or the index, stays.
#[test]
fn what_was_done_stays_when_its_result_cannot_be_printed() {
    let folder = folder();
    let index = "search build --count 50 --dim 8 --json -o";
    for (line, made) in [
        ("import in -d sim:new.img?size=64KiB", "new.img"),
        ("write -i in --json -d sim:new.img?size=64KiB", "new.img"),
        (
            "write-zeroes -s 0 -b 1 -d sim:new.img?size=64KiB",
            "new.img",
        ),
        ("dsm --ad -s 0 -b 1 -d sim:new.img?size=64KiB", "new.img"),
        ("format -n 1 -d sim:new.img?size=64KiB", "new.img"),
        (
            "sanitize -a start-block-erase -d sim:new.img?size=64KiB",
            "new.img",
        ),
        (
            "set-feature -f 6 --value 0 -d sim:new.img?size=64KiB",
            "new.img",
        ),
        ("io-passthru -O 8 -d sim:new.img?size=64KiB", "new.img"),
        (&format!("{index} ./new.idx"), "new.idx"),
        (&format!("{index} sim:new.img?size=1MiB"), "new.img"),
    ] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut command = folder.command();
        let output = command.args(words(line)).stdout(full).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(4), "{line}: {said}");
        let path = folder.path(made);
        assert!(path.exists(), "{line}: {said}");
        if line.contains("-i in") || line.contains("import") {
            assert_eq!(
                bytes(&path)[..2 * BLOCK],
                bytes(&folder.path("in")),
                "{line}"
            );
        }
        std::fs::remove_file(path).unwrap();
    }
}

/// A command that failed removed whatever was at the path of the image that it had made.
#[test]
fn a_failed_command_leaves_the_file_that_another_process_has_put_there() {
    let folder = folder();
    let (pipe, image) = (folder.path("pipe"), folder.path("new.img"));
    for is_replaced in [false, true] {
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.unwrap().success());
        let mut command = folder.command();
        command.args(words("write -d sim:new.img?size=64KiB -b 4 -i pipe"));
        let mut child = command.stderr(std::process::Stdio::null()).spawn().unwrap();
        let input = File::options().write(true).open(&pipe).unwrap();
        while !image.exists() {
            assert!(child.try_wait().unwrap().is_none(), "it opens its device");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        if is_replaced {
            std::fs::write(folder.path("other"), "another's").unwrap();
            std::fs::rename(folder.path("other"), &image).unwrap();
        }
        drop(input);
        assert_eq!(child.wait().unwrap().code(), Some(2));
        let left = std::fs::read(&image).ok();
        assert_eq!(left, is_replaced.then(|| b"another's".to_vec()));
        std::fs::remove_file(&pipe).unwrap();
    }
}

/// The first part was written, and is not written again.
#[test]
fn an_import_that_failed_is_continued() {
    let folder = folder();
    let fault = "sim:new.img?size=64KiB&fault=status:0x281@op=read";
    folder.fails(&["import", "in", "-d", fault], 1, "Unrecovered Read Error");
    let again = folder.json(&["import", "in", "-d", "sim:new.img", "--resume"]);
    assert_eq!(again["written"], 0);
}

/// The whole of an input was held once: 40 GiB of zeroes would not fit.
#[test]
fn long_inputs_are_sent_in_bounded_memory() {
    let folder = folder();
    for line in [
        "ulimit -v 1500000; $B write -d sim:null -i /dev/zero --blocks 524288",
        "ulimit -v 1500000; head -c 2147483648 /dev/zero | $B write -d sim:null -i -",
        "truncate -s 2G sparse; ulimit -v 1500000; $B write -d sim:null -i sparse",
    ] {
        let (code, said) = shell(&folder, line);
        assert_eq!((code, said.as_str()), (Some(0), ""), "{line}");
    }
}

/// Another user's files. The test needs root to become that user; a skipped part prints that.
#[test]
fn files_of_others_are_named_with_their_remedy() {
    use std::os::unix::fs::PermissionsExt;
    let folder = folder();
    let only_owner = |name: &str| {
        let mode = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(folder.path(name), mode).unwrap();
    };
    only_owner("disk.img");
    only_owner("in");
    let binary = folder.path("tool");
    std::fs::copy(env!("CARGO_BIN_EXE_nvme-gpu"), &binary).unwrap();
    let user = "setpriv --reuid 65534 --regid 65534 --clear-groups";
    if shell(&folder, &format!("{user} ./tool --version")).0 != Some(0) {
        eprintln!("skipped: cannot become another user here");
        return;
    }
    for (line, code, text) in [
        ("./tool read -d sim:disk.img", 4, "check the permissions"),
        ("./tool write -d sim:mem -i in", 4, "check the permissions"),
        (
            "./tool read -d sim:mem -b 1 -o out",
            4,
            "check the permissions",
        ),
        (
            "./tool write -d 'sim:new.img?size=1MiB' -i long",
            4,
            "check the permissions",
        ),
        (
            "./tool serve -d sim:mem -s cntrl",
            2,
            "folder that you may write to",
        ),
    ] {
        let (came, said) = shell(&folder, &format!("{user} {line}"));
        assert_eq!(
            fault(came, code, "", &said, text, false),
            None,
            "{line}: {said}"
        );
    }
}

#[test]
fn an_image_is_shared_by_those_who_read() {
    let folder = Folder::new(Place::Embedded);
    folder.file("disk.img", 64 * BLOCK, 1);
    folder.file("in", BLOCK, 2);
    let device = format!("sim:{}", folder.path("disk.img").display());
    let reader = nvme_host::open_reading(&device).unwrap();
    folder.ok(&["read", "-d", &device, "-b", "1", "-o", "out"]);
    folder.ok(&["compare", "-d", &device, "-i", "out"]);
    folder.fails(
        &["write", "-d", &device, "-i", "in"],
        4,
        "the image is open already",
    );
    drop(reader);
    folder.ok(&["write", "-d", &device, "-i", "in"]);
}
