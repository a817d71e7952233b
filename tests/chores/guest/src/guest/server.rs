//! `nvme-gpu serve`: the simulated controller, for a QEMU that speaks vfio-user.

use super::apt::failed;
use chores::process::{Failure, shown};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(10);

/// A serving process. It is killed when this is dropped.
pub struct Server {
    process: Child,
    log: PathBuf,
    socket: PathBuf,
}

impl Server {
    /// Serves `device` at `socket`, the protocol auditor beside it, and waits until the socket is there.
    pub fn start(
        program: &Path,
        device: &str,
        socket: PathBuf,
        log: PathBuf,
    ) -> Result<Self, Failure> {
        let output = fs::File::create(&log).map_err(|error| failed(&log, &error))?;
        let errors = output.try_clone().map_err(|error| failed(&log, &error))?;
        let joint = if device.contains('?') { '&' } else { '?' };
        let device = format!("{device}{joint}audit=on");
        let mut serve = Command::new(program);
        serve
            .args(["serve", "--device", &device, "--socket"])
            .arg(&socket)
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors);
        let process = serve
            .spawn()
            .map_err(|error| Failure::new(format!("{}: {error}", shown(&serve))))?;
        let mut server = Self {
            process,
            log,
            socket,
        };
        let start = Instant::now();
        while !server.socket.exists() {
            if let Some(status) = server.ended()? {
                return Err(Failure::new(format!(
                    "{}: {status}: {}",
                    shown(&serve),
                    server.said()
                )));
            }
            if start.elapsed() > PATIENCE {
                return Err(Failure::new(format!(
                    "{}: no socket within {PATIENCE:?}",
                    shown(&serve)
                )));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Asks the server to end. The error says what went wrong, or what its auditor found besides `breaks`.
    pub fn stop(mut self, breaks: &[&str]) -> Result<(), Failure> {
        if let Some(status) = self.ended()? {
            return Err(Failure::new(format!(
                "the server was gone before the guest: {status}: {}",
                self.said()
            )));
        }
        let pid = self.process.id().to_string();
        let kill = Command::new("kill").arg(pid).status();
        kill.map_err(|error| Failure::new(format!("kill: {error}")))?;
        let start = Instant::now();
        loop {
            match self.ended()? {
                // An interrupted command of the tool ends with 130.
                Some(status) if status.success() || status.code() == Some(130) => {
                    return judged(&self.said(), breaks);
                }
                Some(status) => {
                    return Err(Failure::new(format!(
                        "the server ended with {status}: {}",
                        self.said()
                    )));
                }
                None if start.elapsed() > PATIENCE => {
                    return Err(Failure::new(format!(
                        "the server did not end within {PATIENCE:?} after SIGTERM: {}",
                        self.said()
                    )));
                }
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    fn ended(&mut self) -> Result<Option<ExitStatus>, Failure> {
        let status = self.process.try_wait();
        status.map_err(|error| Failure::new(format!("nvme-gpu serve: {error}")))
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }
}

/// Returns the findings of the protocol auditor besides `breaks` as an error.
fn judged(said: &str, breaks: &[&str]) -> Result<(), Failure> {
    let expected = |line: &str| {
        let mut rules = breaks.iter();
        rules.any(|rule| line.contains(&format!(": {rule}, ")))
    };
    let found: Vec<&str> = said
        .lines()
        .filter(|line| line.starts_with("audit: ") && !expected(line))
        .collect();
    match found.first() {
        None => Ok(()),
        Some(first) => Err(Failure::new(format!(
            "{} findings of the protocol auditor, the first: {first}",
            found.len()
        ))),
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both calls fail only if the server has already ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::judged;

    #[test]
    fn a_finding_of_the_auditor_is_a_failure() {
        assert!(judged("clients: 1\ncommands: 7\n", &[]).is_ok());
        let said = "clients: 1\naudit: driver: queue 1: TailDoorbell, it\naudit: driver: queue 1: LbaRange, a\n";
        let text = judged(said, &[]).unwrap_err().to_string();
        assert!(text.starts_with("2 findings") && text.contains("TailDoorbell"));
        let text = judged(said, &["TailDoorbell"]).unwrap_err().to_string();
        assert!(text.starts_with("1 findings") && text.contains("LbaRange"));
        assert!(judged(said, &["TailDoorbell", "LbaRange"]).is_ok());
    }
}
