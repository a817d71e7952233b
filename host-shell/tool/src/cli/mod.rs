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
mod failure;
mod feature;
mod file;
mod flush;
mod format;
mod get_log;
#[cfg(feature = "cuda")]
mod gpu;
mod hex;
mod identify;
mod images;
mod input;
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
mod refusal;
mod regs;
mod reset;
mod sanitize;
mod say;
#[cfg(feature = "sim")]
mod serve;
mod smart_log;
mod stream;
mod visible;
mod write;
mod write_zeroes;

use access::{AccessArgs, WriteArgs};
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use nvme_host::core::spec::Nsid;
use nvme_host::units::{parse_bytes, parse_duration, parse_in};
use nvme_host::{Config, Controller, Device, Error, Result, exit};
use std::ffi::OsString;
use std::ops::RangeInclusive;
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

Sizes take KiB, MiB, GiB, TiB (or K, M, G, T; 1024) and kB, MB, GB, TB (1000); times need ns, us, ms, s or m;
numbers may be hexadecimal with 0x.

With --json, results are one object on standard output and errors one object on standard error (docs/json.md).

Exit codes: 0 done, 1 controller error, 2 wrong usage or range, 3 data differs, 4 file error,
5 no answer in time or device gone, 6 this machine lacks something (memory, permission, driver, GPU),
7 a fault of this program, 130 interrupted (Ctrl-C, SIGTERM, SIGHUP).";

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
    #[arg(long, short = 't', visible_alias = "timeout", value_name = "MS", default_value_t = 5000, value_parser = number::<u64>(1..=3_600_000))]
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
    #[arg(long, short = 'n', value_name = "NSID", default_value_t = 1, value_parser = number::<u32>(1..=0xFFFF_FFFE))]
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
        self.access.start(self.open()?, config)
    }

    /// Opens the device for a command that changes nothing: a missing image stays missing.
    fn open(&self) -> Result<Arc<dyn Device>> {
        images::must_exist(&self.device)?;
        nvme_host::open(&self.device)
    }

    /// Opens the device for `what`, a command that changes what is stored. An image that this creates is
    /// removed when the command fails.
    fn open_to_write(&self, write: &WriteArgs, what: &str) -> Result<Arc<dyn Device>> {
        images::about_to_open(&self.device);
        let device = nvme_host::open(&self.device)?;
        write.check(&*device, what)?;
        Ok(device)
    }

    /// As [`start`](Self::start), for `what`, a command that changes what is stored.
    fn start_writing(&self, write: &WriteArgs, what: &str, config: &Config) -> Result<Controller> {
        self.access.start(self.open_to_write(write, what)?, config)
    }
}

/// The flag that Ctrl-C, SIGTERM and SIGHUP set; a second Ctrl-C ends the process at once. A signal that
/// was ignored when the process began, as under nohup, stays ignored.
fn stop_flag() -> Arc<AtomicBool> {
    static FLAG: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    Arc::clone(FLAG.get_or_init(|| {
        let flag = Arc::new(AtomicBool::new(false));
        use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
        // A write beyond the limit of file sizes is then an error, after which what is incomplete is removed.
        let _ = signal_hook::flag::register(libc::SIGXFSZ, Arc::default());
        let ignored = ignored_signals();
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            if ignored & 1 << (signal - 1) != 0 {
                continue;
            }
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

/// The signals that the process was started with as ignored, a bit each, from bit 0 for signal 1 on.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
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
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    // What clap refuses is an error like any other.
    let as_json = arguments.iter().any(|argument| argument == "--json");
    let ended = match parse(&arguments) {
        Ok(cli) => run_command(cli),
        Err(refused) => refused,
    };
    match ended {
        Ok(()) => ExitCode::from(exit::OK),
        Err(error) => {
            if !matches!(error, Error::Mismatch { .. }) {
                images::remove_created();
            }
            failure::report(&error, images::device(), as_json)
        }
    }
}

fn run_command(cli: Cli) -> Result<()> {
    failure::check_standard_output()?;
    stop_flag();
    say::set(cli.quiet, cli.verbose);
    match cli.command {
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
    }
}

/// Reads the command line. Help and version are printed, and an end without an error.
fn parse(arguments: &[OsString]) -> std::result::Result<Cli, Result<()>> {
    let command = command_line();
    let name = OsString::from(command.get_name());
    let all = std::iter::once(&name).chain(arguments);
    let parsed = command
        .clone()
        .try_get_matches_from(all)
        .and_then(|matches| {
            images::set_device(device_of(&matches));
            Cli::from_arg_matches(&matches)
        });
    parsed.map_err(|error| match error.use_stderr() {
        true => Err(refusal::explain(&command, arguments, &error)),
        false => failure::check_standard_output().and_then(|()| {
            let text = error.render().to_string();
            output::print(&text)
        }),
    })
}

/// The grammar of the command line. The suite of `bench` needs no device.
fn command_line() -> clap::Command {
    let command = Cli::command();
    #[cfg(feature = "cuda")]
    let command = command.mut_subcommand("bench", |bench| {
        bench.mut_arg("device", |device| {
            let none = clap::builder::ArgPredicate::IsPresent;
            device
                .required(false)
                .required_unless_present("suite")
                .default_value_if("suite", none, "none")
        })
    });
    command
}

/// What was given as --device, to whatever subcommand.
fn device_of(matches: &clap::ArgMatches) -> Option<String> {
    let (_, matches) = matches.subcommand()?;
    let device = matches.try_get_one::<String>("device").ok().flatten();
    device.cloned().or_else(|| device_of(matches))
}

/// For clap: a whole number in `range`, decimal or hexadecimal with 0x.
fn number<T>(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> std::result::Result<T, String> + Clone + Send + Sync + 'static
where
    T: TryFrom<u64> + Clone + Send + Sync + 'static,
{
    move |text| parse_in(text, &range)
}

/// For clap: a number of bytes that is not 0.
fn some_bytes(text: &str) -> std::result::Result<u64, String> {
    match parse_bytes(text)? {
        0 => Err(format!(
            "'{text}' is zero; use a multiple of the block size"
        )),
        bytes => Ok(bytes),
    }
}

/// For clap: a duration such as `10s`.
fn duration(text: &str) -> std::result::Result<Duration, String> {
    parse_duration(text)
}
