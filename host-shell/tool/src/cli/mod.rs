//! The command line: its grammar, the choice of the command to run, and how a command ends: its error, its remedy
//! and its exit code. Usage errors of clap are rewritten here, so that all errors of the tool have the same form.

mod apart;
mod complete;
mod failure;
mod refusal;

use crate::admin::{
    error_log, feature, format, get_log, identify, list_ns, passthru, sanitize, smart_log,
};
use crate::bench::{Bench, NO_DEVICE, NO_DEVICE_FOR};
use crate::common::{VERSION, images, output, say, stop_flag};
use crate::demo::Demo;
use crate::device::{bind, doctor, events, list, p2p, regs, reset, topology};
#[cfg(feature = "sim")]
use crate::device::{devices, serve};
use crate::files::{cat, catalog, cp, import, ls, manifest, pack, stat};
use crate::io::{compare, dsm, flush, read, stream, write, write_zeroes};
use crate::model::generate;
use crate::pipeline::Pipeline;
use crate::search::Search;
use crate::witness::Witness;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use nvme_host::{Error, Result, exit};
use std::ffi::OsString;
use std::process::ExitCode;

const AFTER_HELP: &str = "\
Devices:
  sim:PATH[?option=value&...]   a disk image behind the embedded simulator; an existing file is opened as it
                                is, a missing one is created when size= is given
  sim:mem[?size=1GiB]           memory, lost at the end
  sim:null[?size=1TiB]          reads zeroes, forgets writes
                                `nvme-gpu devices` lists every option and fault of sim:
  vfio:BDF[?iommu=HOW]          a controller on PCIe that is bound to vfio-pci (`nvme-gpu list`, `bind`, `doctor`);
                                HOW is type1 (default), iommufd, or auto: iommufd where both can be opened
  kmod:BDF                      a controller on PCIe that is bound to the module nvme_gpu (docs/kmod.md)
  vfio-user:SOCKET              a controller in another process, e.g. one that `nvme-gpu serve` offers

Files on a drive that no kernel mounts (ls, cat, cp, stat, catalog):
  DEVICE:/path                  a path of the ext4 on the device; file:PATH and a path that begins with / or ./ are
                                devices, too. part=N among the options, or after ?, names a partition of a GPT:
                                vfio:0000:01:00.0?part=1:/models/model.gguf

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
    Demo(Demo),
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
    Topology(topology::Topology),
    Witness(Box<Witness>),
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
    Bench(Box<Bench>),
    Stream(stream::Stream),
    Ls(ls::Ls),
    Cat(cat::Cat),
    Cp(cp::Cp),
    Stat(stat::Stat),
    Catalog(catalog::CatalogArgs),
    Pack(pack::Pack),
    Import(import::Import),
    Verify(import::Verify),
    Manifest(manifest::ManifestArgs),
    Generate(Box<generate::Generate>),
    Search(Search),
    Pipeline(Box<Pipeline>),
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

/// Runs the command line; the exit code is one of [`exit`].
pub fn run() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    // A usage error of clap is reported like any other error.
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
        Command::Topology(command) => command.run(),
        Command::Witness(command) => command.run(),
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
        Command::Ls(command) => command.run(),
        Command::Cat(command) => command.run(),
        Command::Cp(command) => command.run(),
        Command::Stat(command) => command.run(),
        Command::Catalog(command) => command.run(),
        Command::Pack(command) => command.run(),
        Command::Import(command) => command.run(),
        Command::Verify(command) => command.run(),
        Command::Manifest(command) => command.run(),
        Command::Generate(command) => command.run(),
        Command::Search(command) => command.run(),
        Command::Pipeline(command) => command.run(),
        Command::Regs(command) => command.run(),
        Command::GetLog(command) => command.run(),
        Command::AdminPassthru(command) => command.run(),
        Command::IoPassthru(command) => command.run(),
        Command::Format(command) => command.run(),
        Command::Sanitize(command) => command.run(),
        Command::SanitizeLog(command) => command.run(),
        Command::Reset(command) => command.run(),
        Command::Completions(command) => command.run(command_line()),
        Command::Man(command) => command.run(command_line()),
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
            Ok((Cli::from_arg_matches(&matches)?, matches))
        });
    let parsed = parsed.map(|(cli, matches)| match apart::check(&command, &matches) {
        Ok(()) => Ok(cli),
        Err(error) => Err(Err(error)),
    });
    parsed.unwrap_or_else(|error| Err(refusal_of(&command, arguments, &error)))
}

/// Prints help and version, which are no errors; returns any other refusal as an error.
fn refusal_of(command: &clap::Command, arguments: &[OsString], error: &clap::Error) -> Result<()> {
    match error.use_stderr() {
        true => Err(refusal::explain(command, arguments, error)),
        false => failure::check_standard_output().and_then(|()| {
            let text = error.render().to_string();
            output::print(&text)
        }),
    }
}

/// Returns the grammar of the command line. Some ways to `bench` need no device.
fn command_line() -> clap::Command {
    let without = if cfg!(feature = "cuda") {
        &["suite", "matmul", NO_DEVICE_FOR][..]
    } else {
        &[NO_DEVICE_FOR]
    };
    Cli::command().mut_subcommand("bench", |bench| {
        bench.mut_arg("device", |device| {
            let given = || clap::builder::ArgPredicate::IsPresent;
            device
                .required(false)
                .required_unless_present_any(without)
                .default_value_ifs(without.iter().map(|name| (*name, given(), NO_DEVICE)))
        })
    })
}

/// Returns the value of --device, of any subcommand.
fn device_of(matches: &clap::ArgMatches) -> Option<String> {
    let (_, matches) = matches.subcommand()?;
    let device = matches.try_get_one::<String>("device").ok().flatten();
    device.cloned().or_else(|| device_of(matches))
}
