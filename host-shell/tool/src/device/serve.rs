//! `serve`: a simulated controller as a PCI device behind a vfio-user socket.

use crate::common::{output, say, stop_flag, visible};
use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use nvme_host::{Error, Result, sim};
use nvme_sim::vfio_user::{ClientExit, ServeError, Server};
use nvme_sim::{Controller, HostMemory, QueueStats};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Interval of checking for Ctrl-C.
const TICK: Duration = Duration::from_millis(50);

/// Serve a simulated controller to QEMU or another vfio-user client
///
/// Clients are served one after another until Ctrl-C, which ends with exit code 0 and removes the socket. Only its
/// owner can use the socket. With --json, a line says that the socket is there, and one at the end what was done.
#[derive(Args)]
pub struct ServeCommand {
    /// Controller: sim:PATH[?options], sim:mem, sim:null
    #[arg(long, short = 'd')]
    device: String,
    /// Socket to make; one of a server that has ended is replaced
    #[arg(long, short = 's', value_name = "PATH")]
    socket: PathBuf,
    /// Threads that serve the queues, as threads= of the device; 1 when missing
    #[arg(long, value_name = "N", value_parser = crate::common::number::<u16>(1..=64))]
    threads: Option<u16>,
    /// End when the first client has left
    #[arg(long)]
    once: bool,
    /// Print one JSON object when ready and one at the end
    #[arg(long)]
    json: bool,
}

impl ServeCommand {
    pub fn run(self) -> Result<()> {
        let Some(text) = self.device.strip_prefix("sim:") else {
            return Err(Error::usage(
                format!("'{}' cannot be served", self.device),
                "write sim:PATH, sim:mem?size=1GiB or sim:null",
            ));
        };
        let options = text.split_once('?').map_or("", |(_, options)| options);
        let gives_threads = |option: &str| option.starts_with("threads=");
        if self.threads.is_some() && options.split('&').any(gives_threads) {
            return Err(Error::usage(
                "the threads are given twice, by --threads and by threads= of the device",
                "leave out one of them",
            ));
        }
        let config = sim::config(text)?;
        let threads = self.threads.map_or(config.threads, usize::from);
        let mut server = Server::bind(config, &self.socket, threads).map_err(refused)?;
        self.ready(threads)?;
        let clients = AtomicU64::new(0);
        let (done, stopper, controller) = (
            AtomicBool::new(false),
            server.stopper(),
            server.controller(),
        );
        let served = std::thread::scope(|scope| {
            scope.spawn(|| {
                watch(&controller, &clients, &done);
                stopper.stop();
            });
            let served = self.serve(&mut server, &clients);
            done.store(true, Ordering::Relaxed);
            served
        });
        drop(server);
        sim::report(&controller);
        served?;
        self.end(clients.into_inner(), total(&controller))
    }

    fn serve(&self, server: &mut Server, clients: &AtomicU64) -> Result<()> {
        loop {
            let left = server.serve_one().map_err(|source| Error::System {
                call: "accepting a client",
                source,
            })?;
            let Some(left) = left else { return Ok(()) };
            clients.fetch_add(1, Ordering::Relaxed);
            match left {
                ClientExit::Closed => {}
                ClientExit::Disconnected(why) => {
                    say::warn(|| format!("a client was put out: {why}"))
                }
                ClientExit::Failed(why) => say::warn(|| format!("a client's socket failed: {why}")),
            }
            if self.once {
                return Ok(());
            }
        }
    }

    fn ready(&self, threads: usize) -> Result<()> {
        let (device, socket) = (&self.device, self.socket.display().to_string());
        if self.json {
            return output::line(&json!({
                "event": "ready",
                "device": device,
                "socket": socket.to_string(),
                "threads": threads,
                "pid": std::process::id(),
            }));
        }
        output::print(&format!(
            "serving {} at {}, threads: {threads}; Ctrl-C ends",
            visible::line(device),
            visible::line(&socket)
        ))
    }

    fn end(&self, clients: u64, total: QueueStats) -> Result<()> {
        let value = statistics(clients, &total);
        if self.json {
            output::line(&value)
        } else {
            output::table("", &value)
        }
    }
}

/// Shows progress on a terminal until the user or the server ends it.
fn watch(controller: &Controller<HostMemory>, clients: &AtomicU64, done: &AtomicBool) {
    let (stop, started) = (stop_flag(), Instant::now());
    let target = match say::shows_progress() {
        true => ProgressDrawTarget::stderr(),
        false => ProgressDrawTarget::hidden(),
    };
    let bar = ProgressBar::with_draw_target(None, target);
    bar.set_style(
        ProgressStyle::with_template("{elapsed} {msg}")
            .unwrap_or_else(|_| ProgressStyle::default_bar()),
    );
    let (mut before, mut at) = (total(controller).commands, started.elapsed());
    while !stop.load(Ordering::Relaxed) && !done.load(Ordering::Relaxed) {
        std::thread::sleep(TICK);
        let now = started.elapsed();
        if now - at < Duration::from_secs(1) {
            continue;
        }
        let commands = total(controller).commands;
        let rate = (commands - before) as f64 / (now - at).as_secs_f64();
        bar.set_message(format!(
            "clients: {}  commands: {commands}  {rate:.0}/s",
            clients.load(Ordering::Relaxed)
        ));
        (before, at) = (commands, now);
    }
    bar.finish_and_clear();
}

/// Returns the sum of the counters of all queues.
fn total(controller: &Controller<HostMemory>) -> QueueStats {
    let queues = (0..=controller.max_qid()).map(|qid| controller.queue_stats(qid));
    queues.fold(QueueStats::default(), |sum, one| QueueStats {
        commands: sum.commands + one.commands,
        reads: sum.reads + one.reads,
        writes: sum.writes + one.writes,
        read_bytes: sum.read_bytes + one.read_bytes,
        written_bytes: sum.written_bytes + one.written_bytes,
        errors: sum.errors + one.errors,
        batches: sum.batches + one.batches,
        cq_full: sum.cq_full + one.cq_full,
    })
}

fn statistics(clients: u64, total: &QueueStats) -> Value {
    json!({
        "event": "end",
        "clients": clients,
        "commands": total.commands,
        "reads": total.reads,
        "writes": total.writes,
        "read_bytes": total.read_bytes,
        "written_bytes": total.written_bytes,
        "errors": total.errors,
    })
}

fn refused(error: ServeError) -> Error {
    match error {
        ServeError::Config(error) => sim::refused(error),
        ServeError::Socket {
            path,
            cause,
            remedy,
        } => Error::usage(
            format!("the socket {} cannot be made: {cause}", path.display()),
            remedy,
        ),
        ServeError::System(call, source) => Error::System { call, source },
    }
}
