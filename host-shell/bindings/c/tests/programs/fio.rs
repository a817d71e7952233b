//! fio with the engine of host-shell/bindings/fio, against the simulated drive, and over the stand-in of CUDA.

use super::{Folder, built, folder, here, said};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// fio, and the engine built for it with more `flags`.
struct Fio {
    folder: Folder,
    engine: PathBuf,
}

fn source() -> String {
    let source = std::env::var("FIO_SOURCE");
    source.expect(
        "FIO_SOURCE names fio's configured sources: `cargo xtask test c-interface` gets them",
    )
}

impl Fio {
    fn new(name: &str, flags: &str) -> Self {
        let folder = folder(name);
        let mut make = Command::new("make");
        make.arg("-C").arg(here("../fio"));
        make.arg(format!("FIO={}", source()));
        make.arg(format!("BUILD={}", folder.0.display()));
        make.arg(format!("CFLAGS=-O1 -g -Werror {flags}"));
        make.arg(format!("NVME_GPU_CFLAGS=-I{}", here("include").display()));
        make.arg(format!("NVME_GPU_LIBS=-L{} -lnvme_gpu", folder.0.display()));
        let output = make.output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        let engine = folder.path("fio-nvme_gpu.so");
        Self { folder, engine }
    }

    fn run(&self, words: &[&str]) -> Output {
        let mut fio = Command::new("fio");
        fio.arg(format!("--ioengine=external:{}", self.engine.display()));
        fio.args(words).current_dir(&self.folder.0);
        fio.env("LD_LIBRARY_PATH", &self.folder.0).output().unwrap()
    }

    /// A job of 4 KiB and depth 32 that ends well: what fio says.
    fn ok(&self, device: &str, words: &str) -> String {
        let output = self.run(&job(device, words));
        let text = said(&output);
        assert!(
            output.status.success() && text.contains("err= 0"),
            "{words}: {text}"
        );
        text
    }

    /// A job that ends with an error, which fio and the engine name.
    fn fails(&self, device: &str, words: &str, parts: &[&str]) {
        let output = self.run(&job(device, words));
        let text = said(&output);
        assert!(!output.status.success(), "{words}: {text}");
        assert!(
            parts.iter().all(|part| text.contains(part)),
            "{words}, {parts:?}: {text}"
        );
    }
}

fn job<'a>(device: &'a str, words: &'a str) -> Vec<&'a str> {
    let mut all = vec!["--name=a", "--bs=4k", "--iodepth=32"];
    all.extend(words.split_whitespace());
    all.push(device);
    all
}

/// Overwrites some bytes of an image.
fn damage(image: &Path) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::options().write(true).open(image).unwrap();
    file.write_all_at(&[0xEE; 64], 1_000_000).unwrap();
}

#[test]
#[ignore = "needs fio and its sources"]
fn fio_verifies_mixes_paces_and_names_what_fails() {
    let fio = Fio::new("fio", "");
    let device = "--device=sim:fio.img?size=16MiB&queues=16";
    let text = fio.ok(device, "--rw=randwrite --verify=crc32c --size=4M");
    assert!(text.contains("issued rwts: total=1024,1024,0,0"), "{text}");
    // Three jobs share the drive; flushes are among the writes.
    let text = fio.ok(
        device,
        "--rw=randrw --verify=crc32c --size=1M --numjobs=3 --offset_increment=4M --fsync=64",
    );
    assert_eq!(text.matches("err= 0").count(), 3, "{text}");
    // 1 MiB at 2 MiB a second.
    let begin = Instant::now();
    fio.ok(device, "--rw=randrw --size=1M --io_size=1M --rate=2m");
    assert!(
        begin.elapsed() > Duration::from_millis(200),
        "{:?}",
        begin.elapsed()
    );

    fio.ok(device, "--rw=write --verify=crc32c --size=4M");
    let read = "--rw=randread --verify=crc32c --size=4M";
    fio.ok(device, read);
    damage(&fio.folder.path("fio.img"));
    fio.fails(device, read, &["verify failed at file", "err=84"]);
    let faulty = |fault: &str| {
        format!("--device=sim:mem?size=16MiB&queues=16&fault={fault}@op=read,nth=100")
    };
    let of_medium = ["Unrecovered Read Error: check the medium", "err= 5"];
    fio.fails(
        &faulty("status:0x281"),
        "--rw=randread --size=4M",
        &of_medium,
    );
    let lost = ["Timeout", "err=110"];
    fio.fails(
        &faulty("drop"),
        "--rw=randread --size=4M --timeout_ms=200",
        &lost,
    );
    fio.fails("--rw=read", "", &["no device"]);
    // All files of a job would be the same bytes.
    fio.fails(device, "--rw=read --nrfiles=4", &["files in one job"]);
    fio.fails(device, "--rw=read --filename=a:b", &["files in one job"]);
    fio.fails(device, "--rw=read --offset=16M", &["is not on the device"]);
    // What fio reads or writes for the job and the device are not one file, by whatever name.
    let image = fio.folder.path("fio.img");
    let before = std::fs::read(&image).unwrap();
    std::os::unix::fs::symlink(&image, fio.folder.path("link")).unwrap();
    for words in [
        "--write_iolog=fio.img",
        "--write_iolog=./fio.img",
        "--write_iolog=link",
        "--read_iolog=fio.img",
        "--read_iolog=none:link",
    ] {
        let words = format!("--rw=write --size=1M {words}");
        fio.fails(device, &words, &["is a file of device="]);
    }
    assert!(std::fs::read(&image).unwrap() == before);
    // Members, escapes and further namespaces are files of the device, too.
    std::fs::write(fio.folder.path("x"), [0; 4096]).unwrap();
    std::os::unix::fs::symlink(fio.folder.path("x"), fio.folder.path("y")).unwrap();
    for (device, log) in [
        ("joined:file:x|file:z", "x"),
        ("joined:file:x|file:z", "y"),
        ("stripe:file:z|file:y?stripe=4096", "x"),
        ("stripe:sim:z?size=1MiB|sim:x?size=1MiB", "y"),
        ("file:a?b", "a?b"),
        ("sim:a%3fb%253F?size=1MiB", "a?b%3F"),
        ("sim:d?size=1MiB&ns=2", "d.2"),
        ("sim:n?size=1MiB", "./n"),
    ] {
        let words = format!("--rw=write --size=1M --write_iolog={log}");
        let device = format!("--device={device}");
        fio.fails(&device, &words, &["is a file of device="]);
    }
    assert_eq!(std::fs::read(fio.folder.path("x")).unwrap(), [0; 4096]);
    // Jobs share the store of a device, and with it the right to write.
    for (first, second, how) in [
        ("--allow_write", "--loops=1", "with allow_write"),
        ("--loops=1", "--allow_write", "without allow_write"),
    ] {
        let device = "--device=sim:mem?size=1MiB";
        let shared = ["--bs=4k", "--rw=read", "--size=1M"];
        let jobs = ["--name=a", device, first, "--name=b", device, second];
        let output = fio.run(&[&shared[..], &jobs].concat());
        let text = said(&output);
        assert!(!output.status.success() && text.contains(how), "{text}");
    }
    fio.fails("--device=nonsense", "--rw=read", &["names no device"]);
    fio.fails(
        device,
        "--rw=randtrim --size=1M",
        &["Operation not supported"],
    );

    // Another version of fio's interface is refused by fio.
    let old = "#include \"fio.h\"\n#undef FIO_IOOPS_VERSION\n#define FIO_IOOPS_VERSION 30\n";
    let header = fio.folder.path("old.h");
    std::fs::write(&header, old).unwrap();
    let flags = format!(
        "-isystem {0} -include {0}/config-host.h -include {1}",
        source(),
        header.display()
    );
    let old = Fio::new("fio-old", &flags);
    old.fails(
        device,
        "--rw=read --size=1M",
        &["bad ioops version 30 (want 31)"],
    );
}

#[test]
#[ignore = "needs fio and its sources"]
fn fio_reads_into_memory_of_a_gpu_by_either_initiator() {
    let fio = Fio::new("fio-gpu", "");
    let device = "--device=sim:fio.img?size=8MiB&queues=32";
    fio.ok(
        device,
        "--data=gpu --rw=randwrite --verify=crc32c --size=2M",
    );
    let by_gpu = "--data=gpu --initiator=gpu --rw=randread --verify=crc32c --size=2M";
    fio.ok(device, by_gpu);
    damage(&fio.folder.path("fio.img"));
    fio.fails(device, by_gpu, &["verify failed at file", "err=84"]);
    let faulty = "--device=sim:mem?size=8MiB&queues=32&fault=status:0x281@op=read,nth=100";
    let reads = "--data=gpu --initiator=gpu --rw=randread --size=2M";
    fio.fails(faulty, reads, &["Unrecovered Read Error", "err= 5"]);
    for words in [
        "--data=gpu --initiator=gpu --rw=randrw --size=2M",
        "--initiator=gpu --rw=randread --size=2M",
        "--data=gpu --initiator=gpu --rw=randread --bsrange=4k-8k --size=2M",
    ] {
        fio.fails(
            device,
            words,
            &["initiator=gpu: kernels submit reads of one size"],
        );
    }
    fio.fails(
        device,
        "--data=gpu --gpu=3 --rw=read --size=2M",
        &["there is no GPU 3"],
    );
}

/// Each fault of the controller in the way of reads that verify: an error of the system, or right data. A job for each,
/// in one process: none disturbs another.
#[test]
#[ignore = "needs fio and its sources"]
fn fio_ends_with_a_number_of_the_system_under_each_fault() {
    const RECOVERED: &[i32] = &[0, 5, 110];
    const FAULTS: [(&str, &[i32]); 15] = [
        ("drop", &[110]),
        ("stubborn:10s", &[110]),
        ("status:0x281", &[5]),
        ("status:0x6", &[5]),
        ("allones", &[19]),
        ("delay:5ms", &[0]),
        ("reorder", &[0]),
        ("duplicate", RECOVERED),
        ("echo:2ms", RECOVERED),
        ("wrongcid:4095", RECOVERED),
        ("flippedcid:1", RECOVERED),
        ("wrongphase", RECOVERED),
        ("badsqhd:60000", RECOVERED),
        ("torncqe", RECOVERED),
        ("cfs", RECOVERED),
    ];
    let fio = Fio::new("fio-faults", "");
    let jobs = FAULTS.iter().enumerate().flat_map(|(number, (fault, _))| {
        let device = format!("sim:mem?size=1MiB&queues=4&fault={fault}@op=read,nth=60");
        [format!("--name=f{number}-"), format!("--device={device}")]
    });
    let words = "--bs=4k --iodepth=32 --rw=randwrite --verify=crc32c --size=512k --timeout_ms=2000";
    let words: Vec<String> = words.split(' ').map(str::to_owned).chain(jobs).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let output = fio.run(&words);
    let text = said(&output);
    assert!(output.status.code().is_some_and(|code| code != 0), "{text}");
    for (number, (fault, wanted)) in FAULTS.iter().enumerate() {
        let name = format!("f{number}-: (groupid=");
        let line = text.lines().find(|line| line.starts_with(&name));
        let error = line.and_then(|line| line.split("err=").nth(1));
        let digits = error.and_then(|rest| rest.trim().split([' ', ':']).next());
        let number = digits.and_then(|digits| digits.parse::<i32>().ok());
        assert!(
            number.is_some_and(|number| wanted.contains(&number)),
            "{fault} {number:?}: {text}"
        );
    }
}

/// The lines of the guide and of the README that start fio, with the engine that was built here.
#[test]
#[ignore = "needs fio and its sources"]
fn fio_runs_the_lines_of_the_guide() {
    let fio = Fio::new("fio-guide", "");
    let read = |page| std::fs::read_to_string(here(page)).unwrap();
    let text = read("../../../docs/guide/fio.md") + &read("../../../README.md");
    let text = text.replace("\\\n", "");
    let lines = text.lines().filter(|line| line.starts_with("fio "));
    let mut ran = 0;
    for line in lines {
        let line = line.replace("$PREFIX/lib/fio-nvme_gpu.so", fio.engine.to_str().unwrap());
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(&line).current_dir(&fio.folder.0);
        let output = shell
            .env("LD_LIBRARY_PATH", &fio.folder.0)
            .output()
            .unwrap();
        assert!(output.status.success(), "{line}: {}", said(&output));
        assert!(
            said(&output).contains("err= 0"),
            "{line}: {}",
            said(&output)
        );
        ran += 1;
    }
    assert!(ran >= 4 && built("libnvme_gpu_capi.so").exists(), "{ran}");
}
