//! `nvme-gpu serve`: our controller, for a QEMU that speaks vfio-user.

use super::apt::failed;
use crate::process::{Failure, shown};
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
    /// Serves `device` at `socket` and waits until the socket is there.
    pub fn start(
        program: &Path,
        device: &str,
        socket: PathBuf,
        log: PathBuf,
    ) -> Result<Self, Failure> {
        let output = fs::File::create(&log).map_err(|error| failed(&log, &error))?;
        let errors = output.try_clone().map_err(|error| failed(&log, &error))?;
        let mut serve = Command::new(program);
        serve
            .args(["serve", "--device", device, "--socket"])
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

    /// Asks the server to end and says what was wrong with that.
    pub fn stop(mut self) -> Result<(), Failure> {
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
                // 130 is what every command of ours answers to an interruption.
                Some(status) if status.success() || status.code() == Some(130) => return Ok(()),
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

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail only when the server has ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
