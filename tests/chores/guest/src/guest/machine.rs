//! One boot of QEMU: its command line, the lines of its serial port, its end.

use super::apt::{failed, write};
use super::audit;
use super::boots::Boot;
use super::run::Bench;
use super::server::Server;
use chores::background::process_seconds;
use chores::process::{Failure, shown};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// All features that QEMU emulates, without the two flags by which programs and the kernel copy bytes in one
/// instruction: QEMU emulates that instruction byte by byte.
const PROCESSOR: &str = "max,-erms,-fsrm";
/// The same as AMD's first Zen: a kernel with CONFIG_PCI_P2PDMA trusts host bridges from there on.
const PEER_PROCESSOR: &str = "max,-erms,-fsrm,family=23,model=1";
/// Events of QEMU's controllers: a controller was enabled, and a controller is asked to shut down.
pub const STARTED: &str = "pci_nvme_mmio_start_success";
pub const SHUT_DOWN: &str = "pci_nvme_mmio_shutdown_set";
/// PCI slot of the first simulated controller.
const FIRST_SLOT: usize = 0x10;

/// A running QEMU. It is killed when this is dropped.
pub struct Machine {
    qemu: Child,
    lines: Receiver<String>,
    monitor: PathBuf,
    deadline: Instant,
}

/// The next thing that the guest printed or did.
pub enum Next {
    Line(String),
    Ended(ExitStatus),
    Deadline,
}

impl Machine {
    /// Starts `boot` in `folder` with the given initramfs. With `shell`, the serial port is the terminal.
    pub fn start(
        bench: &Bench,
        boot: &Boot,
        folder: &Path,
        initramfs: &Path,
        servers: &[Server],
        shell: bool,
    ) -> Result<Self, Failure> {
        let monitor = folder.join("monitor");
        let _ = fs::remove_file(&monitor);
        let mut qemu = bench.tree.qemu();
        let memory = boot.memory_mib;
        let processor = match bench.kernel.modules {
            Some(_) if boot.passes_peers => PEER_PROCESSOR,
            _ => PROCESSOR,
        };
        qemu.args(["-cpu", processor, "-nodefaults", "-display", "none"])
            .args(["-machine", "q35,accel=tcg,kernel-irqchip=split"])
            .args(["-smp", &boot.cpus.to_string(), "-m", &format!("{memory}M")])
            // The memory is a file, so that a vfio-user controller can map it.
            .arg("-object")
            .arg(format!(
                "memory-backend-memfd,id=mem,size={memory}M,share=on"
            ))
            .args(["-numa", "node,memdev=mem"])
            .arg("-kernel")
            .arg(&bench.kernel.image)
            .arg("-initrd")
            .arg(initramfs)
            .args(["-append", &kernel_line(boot)])
            .args(["-serial", if shell { "mon:stdio" } else { "stdio" }])
            .arg("-serial")
            .arg(format!("file:{}", folder.join("kernel.log").display()))
            .arg("-D")
            .arg(folder.join("qemu.log"))
            .args(["-trace", "pci_nvme_ub*", "-trace", "pci_nvme_err*"]);
        if boot.leaves_running {
            qemu.args(["-trace", STARTED, "-trace", SHUT_DOWN]);
        }
        if !boot.audit.is_empty() {
            qemu.arg("-trace")
                .arg(format!("events={}", audit::events(folder)?.display()));
        }
        if !shell {
            qemu.arg("-monitor")
                .arg(format!("unix:{},server=on,wait=off", monitor.display()));
        }
        let place = folder.display().to_string();
        for words in boot.devices {
            qemu.args(
                words
                    .split_whitespace()
                    .map(|word| word.replace("{dir}", &place)),
            );
        }
        for (number, server) in servers.iter().enumerate() {
            // Only JSON can name an address that has parts.
            qemu.arg("-device").arg(format!(
                r#"{{"driver":"vfio-user-pci","addr":"{:#x}","socket":{{"type":"unix","path":"{}"}}}}"#,
                FIRST_SLOT + number,
                server.socket().display()
            ));
        }
        if !boot.reboots {
            qemu.arg("-no-reboot");
        }
        if boot.iommu {
            qemu.args(["-device", "intel-iommu,intremap=on,caching-mode=on"]);
        }
        write(&folder.join("command"), shown(&qemu).as_bytes())?;
        if shell {
            println!("$ {}", shown(&qemu));
        } else {
            qemu.stdin(Stdio::null()).stdout(Stdio::piped());
            let errors = folder.join("qemu.stderr");
            let errors = fs::File::create(&errors).map_err(|error| failed(&errors, &error))?;
            qemu.stderr(errors);
        }
        let mut child = qemu
            .spawn()
            .map_err(|error| Failure::new(format!("QEMU does not start: {error}")))?;
        let (sender, lines) = channel();
        if let Some(stdout) = child.stdout.take() {
            // Ends with QEMU, which closes the pipe.
            std::thread::spawn(move || {
                for line in BufReader::new(stdout).split(b'\n').map_while(Result::ok) {
                    let line = String::from_utf8_lossy(&line);
                    if sender.send(line.trim_end().to_string()).is_err() {
                        break;
                    }
                }
            });
        }
        Ok(Self {
            qemu: child,
            lines,
            monitor,
            deadline: Instant::now() + Duration::from_secs(boot.deadline_s),
        })
    }

    /// Waits for a line, the end of QEMU, or the deadline.
    pub fn next(&mut self) -> Result<Next, Failure> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        match self.lines.recv_timeout(left) {
            Ok(line) => Ok(Next::Line(line)),
            Err(RecvTimeoutError::Timeout) => Ok(Next::Deadline),
            // The port is closed: QEMU ends, or has ended.
            Err(RecvTimeoutError::Disconnected) => self.end(),
        }
    }

    /// Seconds of processor time that QEMU has used.
    pub fn seconds(&self) -> f64 {
        process_seconds(self.qemu.id())
    }

    /// Sends one line to QEMU's monitor.
    pub fn monitor(&self, line: &str) -> Result<(), Failure> {
        let broken = |error| failed(&self.monitor, &error);
        let mut socket = UnixStream::connect(&self.monitor).map_err(broken)?;
        socket.write_all(line.as_bytes()).map_err(broken)?;
        socket.write_all(b"\n").map_err(broken)?;
        // QEMU reads the commands before it sees the end of the connection. The pause leaves time for its prompt.
        socket
            .set_read_timeout(Some(Duration::from_secs(2)))
            .map_err(broken)?;
        let mut prompt = BufReader::new(socket);
        let mut answer = Vec::new();
        for _ in 0..2 {
            // Reads greeting and echo; a monitor that prints less is no error.
            if prompt.read_until(b')', &mut answer).is_err() {
                break;
            }
        }
        Ok(())
    }

    /// Waits for QEMU's process to end, as long as the deadline allows.
    pub fn end(&mut self) -> Result<Next, Failure> {
        loop {
            let status = self.qemu.try_wait();
            let status = status.map_err(|error| Failure::new(format!("QEMU: {error}")))?;
            if let Some(status) = status {
                return Ok(Next::Ended(status));
            }
            if Instant::now() >= self.deadline {
                return Ok(Next::Deadline);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits for QEMU without a limit: a person uses the terminal.
    pub fn wait(mut self) -> Result<(), Failure> {
        let status = self.qemu.wait();
        status
            .map(drop)
            .map_err(|error| Failure::new(format!("QEMU: {error}")))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Both fail only when QEMU has ended.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

fn kernel_line(boot: &Boot) -> String {
    // The log uses the second port, so that it never splits a line of the tests. An emulated processor may be too slow
    // for the kernel's check of its timer, and has none of the faults that kernels work around.
    let mut line = "console=ttyS1 loglevel=7 panic=-1 rdinit=/init no_timer_check nokaslr \
                    mitigations=off tsc=reliable"
        .to_string();
    if boot.iommu {
        line += " intel_iommu=on";
    }
    if !boot.kernel.is_empty() {
        line += " ";
        line += boot.kernel;
    }
    line
}
