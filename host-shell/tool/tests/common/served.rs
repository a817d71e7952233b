//! `nvme-gpu serve` as a process beside the test.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Deadline for a server's start and for its end.
const PATIENCE: Duration = Duration::from_secs(20);

/// A running server, killed when it is dropped.
pub struct Server {
    child: Option<Child>,
    socket: PathBuf,
}

impl Server {
    /// Serves `device` at `socket`; `command` is the binary in the folder in which it is to run.
    ///
    /// The error is the output of a server that ended instead of listening.
    pub fn start(mut command: Command, device: &str, socket: &Path) -> Result<Self, Output> {
        let device = super::audited(device);
        command
            .args(["serve", "--device", &device, "--socket"])
            .arg(socket)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut server = Self {
            child: Some(command.spawn().unwrap()),
            socket: socket.to_owned(),
        };
        let begin = Instant::now();
        while UnixStream::connect(socket).is_err() {
            if server.has_ended() {
                return Err(server.output());
            }
            assert!(begin.elapsed() < PATIENCE, "the server does not listen");
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(server)
    }

    /// Returns the device as a client names it.
    pub fn device(&self) -> String {
        format!("vfio-user:{}", self.socket.display())
    }

    /// Sends the signal with this name.
    pub fn signal(&self, name: &str) {
        let pid = self.child.as_ref().unwrap().id().to_string();
        let sent = Command::new("kill").args([name, &pid]).status().unwrap();
        assert!(sent.success());
    }

    /// Ends the server as a user does. It must print nothing and leave no socket.
    pub fn stop(mut self) {
        self.signal("-TERM");
        let begin = Instant::now();
        while !self.has_ended() {
            assert!(begin.elapsed() < PATIENCE, "the server does not stop");
            std::thread::sleep(Duration::from_millis(2));
        }
        let output = self.output();
        let said = super::judged(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{said}");
        assert_eq!(said, "");
        assert!(!self.socket.exists(), "the socket is removed");
    }

    /// Kills the server without a chance to clean up.
    pub fn kill(&mut self) {
        if let Some(child) = &mut self.child {
            // The server may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    fn has_ended(&mut self) -> bool {
        self.child.as_mut().unwrap().try_wait().unwrap().is_some()
    }

    fn output(&mut self) -> Output {
        self.child.take().unwrap().wait_with_output().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}
