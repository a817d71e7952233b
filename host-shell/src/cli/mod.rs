//! Subcommands, one file each, and what they share: options, exit codes, the one-line error.

mod access;
mod bench;
#[cfg(feature = "cuda")]
mod bench_gpu;
mod bind;
mod compare;
mod complete;
mod demo;
#[cfg(feature = "sim")]
mod devices;
mod doctor;
mod dsm;
mod error_log;
mod events;
mod feature;
mod file;
mod flush;
mod format;
mod get_log;
#[cfg(feature = "cuda")]
mod gpu;
mod hex;
mod identify;
#[cfg(feature = "cuda")]
mod lasting;
mod list;
mod list_ns;
mod output;
mod p2p;
mod passthru;
mod plot;
mod progress;
mod read;
mod regs;
mod reset;
mod sanitize;
mod say;
#[cfg(feature = "sim")]
mod serve;
mod smart_log;
mod stream;
mod write;
mod write_zeroes;

use access::{AccessArgs, WriteArgs};
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use nvme_host::core::spec::Nsid;
use nvme_host::units::parse_duration;
use nvme_host::{Config, Controller, Error, Result, exit};
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// The version and what it was built from.
const VERSION: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " (",
    env!("NVME_GPU_SOURCE"),
    ")"
);

const AFTER_HELP: &str = "\
Devices:
  sim:PATH[?option=value&...]   a disk image behind the embedded simulator; an existing file is opened as it
                                is, a missing one is created when size= is given
  sim:mem[?size=1GiB]           memory, lost at the end
  sim:null[?size=1TiB]          reads zeroes, forgets writes
                                `nvme-gpu devices` lists every option and fault of sim:
  vfio:BDF                      a controller on PCIe that is bound to vfio-pci (`nvme-gpu list`, `bind`, `doctor`)
  vfio-user:SOCKET              a controller in another process, e.g. one that `nvme-gpu serve` offers

Sizes take KiB, MiB, GiB, TiB (or K, M, G, T; 1024) and kB, MB, GB, TB (1000).

Exit codes: 0 done, 1 controller error, 2 wrong usage or range, 3 data differs, 4 file error,
5 no answer in time or device gone, 130 interrupted.";

#[derive(Parser)]
#[command(name = "nvme-gpu", version = VERSION, about = "An NVMe driver in user space: disks, images and benchmarks", after_help = AFTER_HELP)]
struct Cli {
    /// Print neither progress nor warnings; results and errors stay
    #[arg(long, short = 'q', global = true, conflicts_with = "verbose")]
    quiet: bool,
    /// Say on standard error what is being done
    #[arg(long, short = 'v', global = true)]
    verbose: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Demo(demo::Demo),
    Read(read::Read),
    Write(write::Write),
    Identify(identify::Identify),
    #[command(hide = true)]
    IdCtrl(identify::Ctrl),
    #[command(hide = true)]
    IdNs(identify::Ns),
    ListNs(list_ns::ListNs),
    List(list::List),
    Bind(bind::Bind),
    Unbind(bind::Unbind),
    Doctor(doctor::Doctor),
    P2p(p2p::P2p),
    SmartLog(smart_log::SmartLog),
    ErrorLog(error_log::ErrorLog),
    Events(events::Events),
    GetFeature(feature::GetFeature),
    SetFeature(feature::SetFeature),
    Flush(flush::Flush),
    WriteZeroes(write_zeroes::WriteZeroes),
    Compare(compare::Compare),
    Dsm(dsm::Dsm),
    Bench(bench::Bench),
    Stream(stream::Stream),
    #[command(visible_alias = "show-regs")]
    Regs(regs::Regs),
    GetLog(get_log::GetLog),
    AdminPassthru(passthru::AdminPassthru),
    IoPassthru(passthru::IoPassthru),
    Format(format::Format),
    Sanitize(sanitize::Sanitize),
    SanitizeLog(sanitize::SanitizeLog),
    Reset(reset::Reset),
    Completions(complete::Completions),
    Man(complete::Man),
    #[cfg(feature = "sim")]
    Serve(serve::Serve),
    #[cfg(feature = "sim")]
    Devices(devices::Devices),
}

/// The device and how it is used.
#[derive(Args)]
struct DeviceArgs {
    /// Device: sim:PATH[?options], sim:mem, sim:null, vfio:BDF, vfio-user:SOCKET (see `nvme-gpu --help`)
    #[arg(long, short = 'd')]
    device: String,
    /// How long a command may take before it is aborted
    #[arg(long, short = 't', visible_alias = "timeout", value_name = "MS", default_value_t = 5000, value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    timeout_ms: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    access: AccessArgs,
}

/// A device and one of its namespaces.
#[derive(Args)]
struct NamespaceArgs {
    #[command(flatten)]
    device: DeviceArgs,
    /// Namespace
    #[arg(long, short = 'n', value_name = "NSID", default_value_t = 1)]
    namespace_id: u32,
}

impl NamespaceArgs {
    fn nsid(&self) -> Nsid {
        Nsid(self.namespace_id)
    }
}

impl DeviceArgs {
    fn config(&self) -> Config {
        Config {
            timeout: Duration::from_millis(self.timeout_ms),
            stop: Some(stop_flag()),
            notify: output::warnings(self.json),
            ..Config::default()
        }
    }

    fn start(&self) -> Result<Controller> {
        self.start_with(&self.config())
    }

    fn start_with(&self, config: &Config) -> Result<Controller> {
        self.access.start(nvme_host::open(&self.device)?, config)
    }

    /// As [`start`](Self::start), for `what`, a command that changes what is stored.
    fn start_writing(&self, write: &WriteArgs, what: &str, config: &Config) -> Result<Controller> {
        let device = nvme_host::open(&self.device)?;
        write.check(&*device, what)?;
        self.access.start(device, config)
    }
}

/// The flag that Ctrl-C and SIGTERM set; a second Ctrl-C ends the process at once.
fn stop_flag() -> Arc<AtomicBool> {
    static FLAG: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    Arc::clone(FLAG.get_or_init(|| {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            // In this order: the second signal finds the flag set. Without handlers a signal ends the
            // process without a shutdown, which is the system's default.
            let _ = signal_hook::flag::register_conditional_shutdown(
                signal,
                i32::from(exit::INTERRUPTED),
                Arc::clone(&flag),
            );
            let _ = signal_hook::flag::register(signal, Arc::clone(&flag));
        }
        flag
    }))
}

/// An error once Ctrl-C was pressed, for loops between commands.
fn check_stop() -> Result<()> {
    if stop_flag().load(Ordering::Relaxed) {
        Err(Error::Interrupted)
    } else {
        Ok(())
    }
}

/// Runs the command line; the exit code is one of [`exit`].
pub fn run() -> ExitCode {
    let cli = match parse() {
        Ok(cli) => cli,
        Err(error) if !error.use_stderr() => {
            // Help and version. A closed pipe is the reader's choice.
            let _ = error.print();
            return ExitCode::from(exit::OK);
        }
        Err(error) => return refuse(&error),
    };
    stop_flag();
    say::set(cli.quiet, cli.verbose);
    let result = match cli.command {
        Command::Demo(command) => command.run(),
        Command::Read(command) => command.run(),
        Command::Write(command) => command.run(),
        Command::Identify(command) => command.run(),
        Command::IdCtrl(command) => command.run(),
        Command::IdNs(command) => command.run(),
        Command::ListNs(command) => command.run(),
        Command::List(command) => command.run(),
        Command::Bind(command) => command.run(),
        Command::Unbind(command) => command.run(),
        Command::Doctor(command) => command.run(),
        Command::P2p(command) => command.run(),
        Command::SmartLog(command) => command.run(),
        Command::ErrorLog(command) => command.run(),
        Command::Events(command) => command.run(),
        Command::GetFeature(command) => command.run(),
        Command::SetFeature(command) => command.run(),
        Command::Flush(command) => command.run(),
        Command::WriteZeroes(command) => command.run(),
        Command::Compare(command) => command.run(),
        Command::Dsm(command) => command.run(),
        Command::Bench(command) => command.run(),
        Command::Stream(command) => command.run(),
        Command::Regs(command) => command.run(),
        Command::GetLog(command) => command.run(),
        Command::AdminPassthru(command) => command.run(),
        Command::IoPassthru(command) => command.run(),
        Command::Format(command) => command.run(),
        Command::Sanitize(command) => command.run(),
        Command::SanitizeLog(command) => command.run(),
        Command::Reset(command) => command.run(),
        Command::Completions(command) => command.run(),
        Command::Man(command) => command.run(),
        #[cfg(feature = "sim")]
        Command::Serve(command) => command.run(),
        #[cfg(feature = "sim")]
        Command::Devices(command) => command.run(),
    };
    match result {
        Ok(()) => ExitCode::from(exit::OK),
        Err(error) => {
            report(&error);
            ExitCode::from(error.exit_code())
        }
    }
}

/// Reads the command line.
fn parse() -> std::result::Result<Cli, clap::Error> {
    Cli::from_arg_matches(&command_line().try_get_matches()?)
}

/// What the command line may be. The suite of `bench` needs no device.
fn command_line() -> clap::Command {
    #[cfg(feature = "cuda")]
    let command = Cli::command().mut_subcommand("bench", |bench| {
        bench.mut_arg("device", |device| {
            let none = clap::builder::ArgPredicate::IsPresent;
            device
                .required(false)
                .required_unless_present("suite")
                .default_value_if("suite", none, "none")
        })
    });
    #[cfg(not(feature = "cuda"))]
    let command = Cli::command();
    command
}

fn report(error: &Error) {
    // One line, whatever the texts hold.
    let line = format!("error: {error}: {}", error.remedy()).replace('\n', " ");
    let _ = writeln!(io::stderr(), "{line}");
}

/// One line for a command line that clap refused.
fn refuse(error: &clap::Error) -> ExitCode {
    let text = error.to_string();
    // A missing argument is named on the line after the first.
    let mut lines = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with("Usage:"));
    let first = lines.next().unwrap_or("error: wrong usage").to_owned();
    let first = match first.strip_suffix("not provided:") {
        Some(start) => format!("{start}not provided: {}", lines.next().unwrap_or_default()),
        None => first,
    };
    let first = if first.starts_with("error: ") {
        first
    } else {
        "error: no command was given".to_owned()
    };
    let _ = writeln!(io::stderr(), "{first}: see `nvme-gpu --help`");
    ExitCode::from(exit::USAGE)
}

/// For clap: a duration such as `10s`.
fn duration(text: &str) -> std::result::Result<Duration, String> {
    parse_duration(text)
}
