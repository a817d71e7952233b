//! Runs one boot: makes its images, starts its controllers and the guest, and interprets the guest's lines.

use super::apt::{failed, files, make_folder, write};
use super::audit;
use super::boots::Boot;
use super::cpio::Archive;
use super::dmar;
use super::kernel::Kernel;
use super::machine::{Machine, Next, SHUT_DOWN, STARTED};
use super::programs::PROGRAMS;
use super::server::Server;
use super::tree::Tree;
use chores::process::{Failure, root};
use chores::release;
use chores::report::Counts;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Everything that all boots share.
pub struct Bench {
    pub tree: Tree,
    pub kernel: Kernel,
    /// Folder of the workspace's built programs.
    pub programs: PathBuf,
    /// The kernel modules: nvme_gpu, the test exporter, the stand-in of gdrdrv.
    pub modules: [PathBuf; 3],
}

/// The outcome of a boot.
pub struct Outcome {
    pub counts: Counts,
    pub report: String,
}

impl Bench {
    /// Boots `boot` with `tests` and returns the outcome that the guest reported.
    pub fn run(&self, boot: &Boot, tests: &[&str]) -> Result<Outcome, Failure> {
        let began = Instant::now();
        let boot = &self.kernel.adapted(boot);
        let folder = self.folder(boot)?;
        let initramfs = self.initramfs(&folder, boot, tests, Some(boot.deadline_s))?;
        let sockets = Sockets::new(boot)?;
        let servers = self.servers(boot, &folder, &sockets)?;
        let mut machine = Machine::start(self, boot, &folder, &initramfs, &servers, false)?;
        let mut serial = Serial::default();
        let ended = loop {
            match machine.next()? {
                Next::Line(line) => {
                    if let Some(command) = line.strip_prefix("@monitor ") {
                        machine.monitor(command)?;
                    }
                    serial.line(line, machine.seconds());
                }
                Next::Ended(status) => break format!("QEMU ended with {status}"),
                Next::Deadline => {
                    break format!("no end within {} s; QEMU was killed", boot.deadline_s);
                }
            }
        };
        drop(machine);
        write(&folder.join("serial.log"), serial.text.as_bytes())?;
        let mut outcome = serial.outcome(boot, tests, &ended, &folder);
        for server in servers {
            outcome.require(server.stop(boot.breaks));
        }
        if serial.done {
            outcome.require(shut_down(&lossy(&folder.join("kernel.log"))));
        }
        let log = lossy(&folder.join("qemu.log"));
        if !boot.audit.is_empty() {
            outcome.require(audit::judge(&folder.join("qemu.log"), boot.audit));
        }
        // Only the whole list of tests has to provoke, and leave behind, what the boot declares.
        if tests.len() == boot.tests.len() {
            outcome.require(defined(boot, &log));
            outcome.require(left_behind(boot, &folder));
            outcome.require(left_running(boot, &log));
        } else if boot.defined {
            outcome.require(defined(boot, &log));
        }
        if outcome.counts.failed == 0 {
            // Each boot would leave 200 MB that nobody looks at.
            let images = boot.images.iter().map(|(name, _)| folder.join(name));
            for used in images.chain([initramfs]) {
                fs::remove_file(&used).map_err(|error| failed(&used, &error))?;
            }
        }
        outcome.report += &format!(
            "{}: {} in {:.1} s, {:.1} s of processors; logs in {}\n",
            boot.name,
            outcome.counts,
            began.elapsed().as_secs_f64(),
            serial.used,
            folder.display()
        );
        Ok(outcome)
    }

    /// Boots `boot` for a person.
    pub fn shell(&self, boot: &Boot) -> Result<(), Failure> {
        let folder = self.folder(boot)?;
        let initramfs = self.initramfs(&folder, boot, &[], None)?;
        let sockets = Sockets::new(boot)?;
        let servers = self.servers(boot, &folder, &sockets)?;
        Machine::start(self, boot, &folder, &initramfs, &servers, true)?.wait()
    }

    fn servers(
        &self,
        boot: &Boot,
        folder: &Path,
        sockets: &Sockets,
    ) -> Result<Vec<Server>, Failure> {
        let program = self.programs.join("nvme-gpu");
        let place = folder.display().to_string();
        let devices = boot.servers.iter().enumerate();
        devices
            .map(|(number, device)| {
                let device = device.replace("{dir}", &place);
                let socket = sockets.folder.join(format!("c{number}"));
                let log = folder.join(format!("server{number}.log"));
                Server::start(&program, &device, socket, log)
            })
            .collect()
    }

    /// Returns an empty folder for the boot, with its images.
    fn folder(&self, boot: &Boot) -> Result<PathBuf, Failure> {
        let folder = self.tree.folder().join("runs").join(boot.name);
        if folder.exists() {
            fs::remove_dir_all(&folder).map_err(|error| failed(&folder, &error))?;
        }
        make_folder(&folder)?;
        for (name, mib) in boot.images {
            let path = folder.join(name);
            fs::File::create(&path)
                .and_then(|file| file.set_len(mib << 20))
                .map_err(|error| failed(&path, &error))?;
        }
        Ok(folder)
    }

    /// Joins the base and a second part, which changes from build to build and from boot to boot.
    fn initramfs(
        &self,
        folder: &Path,
        boot: &Boot,
        tests: &[&str],
        limit_s: Option<u64>,
    ) -> Result<PathBuf, Failure> {
        let sources = root().join("tests/guest");
        let mut overlay = Archive::default();
        overlay.link("bin", "usr/bin");
        overlay.file("init", &sources.join("init.sh"))?;
        for script in ["run.sh", "lib.sh"] {
            overlay.file(&format!("tests/{script}"), &sources.join(script))?;
        }
        for path in files(&sources.join("scripts"))? {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            overlay.file(&format!("tests/{name}"), &path)?;
        }
        for (_, program) in PROGRAMS {
            overlay.file(&format!("usr/bin/{program}"), &self.programs.join(program))?;
        }
        let stand_in = self.programs.join(release::STAND_IN_FILE);
        overlay.file("usr/lib/fake-cuda/libcuda.so", &stand_in)?;
        if let Some(modules) = &self.kernel.modules {
            overlay.tree("usr/lib/modules", modules)?;
        }
        for module in &self.modules {
            let name = module.file_name().unwrap_or_default().to_string_lossy();
            overlay.file(&format!("kmod/{name}"), module)?;
        }
        let limit = limit_s.map(|limit| limit.to_string()).unwrap_or_default();
        let shell = if limit_s.is_none() { "yes" } else { "" };
        let plan = format!(
            "TESTS='{}'\nLIMIT='{limit}'\nSHELL='{shell}'\nexport GUEST=yes PATIENCE={} {}\n",
            tests.join(" "),
            self.kernel.patience(),
            boot.variables
        );
        overlay.bytes("tests/plan", plan.as_bytes());
        if let Some(table) = boot.dmar {
            overlay.bytes(dmar::PLACE, &table.table());
        }
        let path = folder.join("initramfs.cpio");
        let base = self.tree.base();
        fs::copy(&base, &path).map_err(|error| failed(&base, &error))?;
        fs::OpenOptions::new()
            .append(true)
            .open(&path)
            .and_then(|mut file| std::io::Write::write_all(&mut file, &overlay.finish()))
            .map_err(|error| failed(&path, &error))?;
        Ok(path)
    }
}

/// Lines of the serial port, and the tests that they report as passed.
#[derive(Default)]
struct Serial {
    text: String,
    /// Names of the tests, each with the seconds of processor time that it took.
    passed: Vec<(String, f64)>,
    /// Seconds of processor time at the last line, and at the one that began the test under way.
    used: f64,
    began: f64,
    done: bool,
}

impl Serial {
    /// Reads a line that was printed after `used` seconds of processor time.
    fn line(&mut self, line: String, used: f64) {
        self.used = self.used.max(used);
        if line.starts_with("@test ") {
            self.began = self.used;
        }
        if let Some(name) = line.strip_prefix("@pass ") {
            let took = self.used - self.began;
            self.passed.push((name.to_string(), took));
        }
        self.done |= line == "@done";
        self.text += &line;
        self.text.push('\n');
    }

    /// Each test passed or failed; a guest that did not reach its end counts as one more failure.
    fn outcome(&self, boot: &Boot, tests: &[&str], ended: &str, folder: &Path) -> Outcome {
        let mut counts = Counts::default();
        let mut report = String::new();
        for test in tests {
            if let Some((_, took)) = self.passed.iter().find(|(name, _)| name == test) {
                report += &format!("{}/{test} ok, {took:.1} s of processors\n", boot.name);
                counts.add(Counts::PASSED);
            } else {
                report += &format!("{}/{test} FAILED\n{}", boot.name, tail(self.part(test), 40));
                counts.add(Counts::FAILED);
            }
        }
        if !self.done {
            report += &format!("{}: the guest did not finish: {ended}\n", boot.name);
            report += &tail(&self.text, 20);
            for log in ["kernel.log", "qemu.stderr"] {
                report += &format!("-- {log}\n{}", tail(&lossy(&folder.join(log)), 20));
            }
            counts.add(Counts::FAILED);
        }
        Outcome { counts, report }
    }

    /// Returns the lines that one test printed.
    fn part(&self, test: &str) -> &str {
        let Some(start) = self.text.find(&format!("@test {test}\n")) else {
            return "";
        };
        let rest = &self.text[start..];
        let end = rest[1..].find("\n@test ").map_or(rest.len(), |at| at + 2);
        &rest[..end]
    }
}

impl Outcome {
    /// Checks one more condition; only a failure is counted.
    fn require(&mut self, result: Result<(), Failure>) {
        if let Err(failure) = result {
            self.counts.add(Counts::FAILED);
            self.report += &format!("FAILED: {failure}\n");
        }
    }
}

/// Fails if QEMU's controllers logged an access that the specification leaves undefined, unless the boot tests such
/// accesses.
fn defined(boot: &Boot, log: &str) -> Result<(), Failure> {
    let lines: Vec<&str> = log
        .lines()
        .filter(|line| line.contains("pci_nvme_ub"))
        .collect();
    match (boot.defined, lines.is_empty()) {
        (true, false) => Err(Failure::new(format!(
            "the driver left the specification:\n{}",
            lines.join("\n")
        ))),
        (false, true) => Err(Failure::new(
            "QEMU logged none of the undefined behaviour that this boot provokes: does it log any?",
        )),
        _ => Ok(()),
    }
}

/// Checks that the controller that was running at the end of the tests was shut down after its last start.
fn left_running(boot: &Boot, log: &str) -> Result<(), Failure> {
    let last = |event| log.rfind(event);
    match (last(STARTED), last(SHUT_DOWN)) {
        _ if !boot.leaves_running => Ok(()),
        (Some(started), Some(shut)) if started < shut => Ok(()),
        _ => Err(Failure::new(
            "the controller that was left running was not shut down with the machine",
        )),
    }
}

/// Checks that the kernel shut down in an orderly way: no controller failed to shut down.
fn shut_down(log: &str) -> Result<(), Failure> {
    if log.contains("shutdown incomplete") || !log.contains("reboot: Power down") {
        return Err(Failure::new(format!(
            "no orderly end of the kernel:\n{}",
            tail(log, 10)
        )));
    }
    Ok(())
}

/// Checks that the images hold the last writes of the tests.
fn left_behind(boot: &Boot, folder: &Path) -> Result<(), Failure> {
    for (image, offset, text) in boot.left_behind {
        let path = folder.join(image);
        let mut found = vec![0; text.len()];
        fs::File::open(&path)
            .and_then(|file| file.read_exact_at(&mut found, *offset))
            .map_err(|error| failed(&path, &error))?;
        if found != text.as_bytes() {
            return Err(Failure::new(format!(
                "{image}: {found:?} at byte {offset} instead of {text:?}: what was written last is lost"
            )));
        }
    }
    Ok(())
}

fn lossy(path: &Path) -> String {
    String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
}

/// A folder with a name short enough for sockets, which dislike more than 107 bytes. Gone when dropped.
struct Sockets {
    folder: PathBuf,
}

impl Sockets {
    fn new(boot: &Boot) -> Result<Self, Failure> {
        let name = format!("nvme-gpu-{}-{}", std::process::id(), boot.name);
        let folder = std::env::temp_dir().join(name);
        make_folder(&folder)?;
        Ok(Self { folder })
    }
}

impl Drop for Sockets {
    fn drop(&mut self) {
        // If this fails, empty files remain in the temporary folder.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    let from = all.len().saturating_sub(lines);
    let mut tail = String::new();
    for line in &all[from..] {
        tail += &format!("    {line}\n");
    }
    tail
}

#[cfg(test)]
mod tests {
    use super::{SHUT_DOWN, STARTED, Serial, defined, left_running, shut_down};
    use crate::guest::boots::BOOTS;
    use chores::report::Counts;
    use std::path::Path;

    fn outcome(lines: &str) -> (Counts, String) {
        let mut serial = Serial::default();
        lines
            .lines()
            .for_each(|line| serial.line(line.to_string(), 0.0));
        let outcome = serial.outcome(&BOOTS[0], &["a", "b"], "killed", Path::new("/nonexistent"));
        (outcome.counts, outcome.report)
    }

    #[test]
    fn only_what_the_guest_passed_counts_as_passed() {
        let (counts, report) = outcome("@test a\nfine\n@pass a\n@test b\nwrong\n@fail b 1\n@done");
        assert_eq!((counts.passed, counts.failed), (1, 1));
        assert!(
            report.contains("wrong") && !report.contains("fine"),
            "{report}"
        );
    }

    #[test]
    fn a_guest_that_stops_fails_what_is_left_and_itself() {
        let (counts, report) = outcome("@test a\n@pass a\n@test b\nhangs");
        assert_eq!((counts.passed, counts.failed), (1, 2));
        assert!(report.contains("killed"), "{report}");
    }

    #[test]
    fn a_guest_that_says_nothing_passes_nothing() {
        let (counts, _) = outcome("");
        assert_eq!((counts.passed, counts.failed), (0, 3));
    }
    #[test]
    fn undefined_behaviour_fails_a_boot_unless_it_is_the_boots_subject() {
        let bad = "pci_nvme_err_req_status cid 1\npci_nvme_ub_db_wr_invalid_cq cqid=1\n";
        let clean = BOOTS.iter().find(|boot| boot.defined).unwrap();
        assert!(defined(clean, "pci_nvme_err_req_status cid 1\n").is_ok());
        assert!(defined(clean, bad).is_err());
        let provoking = BOOTS.iter().find(|boot| !boot.defined).unwrap();
        assert!(defined(provoking, bad).is_ok());
        assert!(defined(provoking, "").is_err());
    }

    #[test]
    fn a_controller_that_runs_at_the_end_has_to_be_shut_down_after_its_last_start() {
        let boot = BOOTS.iter().find(|boot| boot.leaves_running).unwrap();
        let [start, shut] = [STARTED, SHUT_DOWN].map(|event| format!("{event} set\n"));
        assert!(left_running(boot, &format!("{start}{shut}")).is_ok());
        for log in [format!("{start}{shut}{start}"), shut, String::new()] {
            assert!(left_running(boot, &log).is_err());
        }
    }

    #[test]
    fn a_kernel_that_did_not_power_off_or_lost_a_controller_fails() {
        assert!(shut_down("[ 9.1] reboot: Power down\n").is_ok());
        assert!(shut_down("[ 9.1] Kernel panic\n").is_err());
        let late = "nvme nvme0: Device shutdown incomplete; abort shutdown\nreboot: Power down\n";
        assert!(shut_down(late).is_err());
    }
}
