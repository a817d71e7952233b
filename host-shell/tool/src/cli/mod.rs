//! The command line: its grammar, the choice of the command to run, and the command's end: its error, its remedy and
//! its exit code. Usage errors of clap are rewritten here, so that all errors of the tool have the same form.

mod apart;
mod complete;
mod failure;
mod groups;
mod refusal;

use crate::admin::{
    error_log, feature, format, get_log, identify, list_ns, passthru, sanitize, smart_log,
};
use crate::bench::{BenchCommand, NO_DEVICE, NO_DEVICE_FOR};
use crate::common::images::CommandFiles;
use crate::common::{VERSION, output, say, stop_flag};
use crate::demo::DemoCommand;
use crate::device::{bind, doctor, events, list, p2p, regs, reset, topology, why};
#[cfg(feature = "sim")]
use crate::device::{devices, serve};
use crate::files::{cat, catalog, cp, import, ls, manifest, pack, stat};
use crate::io::{compare, dsm, flush, read, stream, write, write_zeroes};
use crate::model::generate;
use crate::pipeline::{self, PipelineCommand};
use crate::search::SearchCommand;
use crate::top::TopCommand;
use crate::witness::WitnessCommand;
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};
use nvme_host::{Error, Result, exit};
use std::ffi::OsString;
use std::process::ExitCode;

const AFTER_HELP: &str = "\
Devices:
  sim:PATH[?option=value&...]   a disk image behind the embedded simulator; an existing file is opened as it
                                is, a missing one is created when size= is given
  sim:mem[?size=1GiB]           memory, lost at the end
  sim:null[?size=1TiB]          reads zeroes, forgets writes
  sim:generated[?size=1TiB]     bytes that follow from their address; cannot be written
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

/// The first sentence of README.md.
const ABOUT: &str =
    "Read NVMe drives from GPU kernels, Python, C or Rust, without the CPU in the data path.";

#[derive(Parser)]
#[command(name = "nvme-gpu", version = VERSION, about = ABOUT, after_help = AFTER_HELP)]
struct CommandLine {
    /// Print neither progress nor warnings; results and errors stay
    #[arg(long, short = 'q', global = true, conflicts_with = "verbose")]
    quiet: bool,
    /// Say on standard error what is being done
    #[arg(long, short = 'v', global = true)]
    verbose: bool,
    #[command(subcommand)]
    command: CliCommand,
}

#[derive(Subcommand)]
enum CliCommand {
    Demo(DemoCommand),
    Read(read::ReadCommand),
    Write(write::WriteCommand),
    Identify(identify::IdentifyCommand),
    #[command(hide = true)]
    IdCtrl(identify::ControllerSubject),
    #[command(hide = true)]
    IdNs(identify::NamespaceSubject),
    ListNs(list_ns::ListNs),
    List(list::ListCommand),
    Bind(bind::BindCommand),
    Unbind(bind::UnbindCommand),
    Doctor(doctor::DoctorCommand),
    Topology(topology::TopologyCommand),
    Why(why::WhyCommand),
    Top(TopCommand),
    Witness(Box<WitnessCommand>),
    P2p(p2p::PeerCommand),
    SmartLog(smart_log::SmartLog),
    ErrorLog(error_log::ErrorLog),
    Events(events::EventsCommand),
    GetFeature(feature::GetFeature),
    SetFeature(feature::SetFeature),
    Flush(flush::FlushCommand),
    WriteZeroes(write_zeroes::WriteZeroes),
    Compare(compare::CompareCommand),
    Dsm(dsm::DsmCommand),
    Bench(Box<BenchCommand>),
    Stream(stream::StreamCommand),
    Ls(ls::LsCommand),
    Cat(cat::CatCommand),
    Cp(cp::CpCommand),
    Stat(stat::StatCommand),
    Catalog(catalog::CatalogArgs),
    Pack(pack::PackCommand),
    Import(import::ImportCommand),
    Verify(import::VerifyCommand),
    Manifest(manifest::ManifestArgs),
    Generate(Box<generate::GenerateCommand>),
    Search(SearchCommand),
    Pipeline(Box<PipelineCommand>),
    #[command(visible_alias = "show-regs")]
    Regs(regs::RegsCommand),
    GetLog(get_log::GetLog),
    AdminPassthru(passthru::AdminPassthru),
    IoPassthru(passthru::IoPassthru),
    Format(format::FormatCommand),
    Sanitize(sanitize::SanitizeCommand),
    SanitizeLog(sanitize::SanitizeLog),
    Reset(reset::ResetCommand),
    Completions(complete::CompletionsCommand),
    Man(complete::ManCommand),
    #[cfg(feature = "sim")]
    Serve(serve::ServeCommand),
    #[cfg(feature = "sim")]
    Devices(devices::DevicesCommand),
}

/// Runs the command line; the exit code is one of [`exit`].
pub fn run() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    // A usage error of clap is reported like any other error.
    let as_json = arguments.iter().any(|argument| argument == "--json");
    let (ended, files) = match parse(&arguments) {
        Ok((cli, files)) => (run_command(cli, &files), files),
        Err(refused) => (refused, CommandFiles::default()),
    };
    match ended {
        Ok(()) => ExitCode::from(exit::OK),
        Err(error) => {
            if !matches!(error, Error::Mismatch { .. }) {
                files.remove_created();
            }
            failure::report(&error, files.device(), as_json)
        }
    }
}

fn run_command(cli: CommandLine, files: &CommandFiles) -> Result<()> {
    failure::check_standard_output()?;
    stop_flag();
    say::set(cli.quiet, cli.verbose);
    match cli.command {
        CliCommand::Demo(command) => command.run(files),
        CliCommand::Read(command) => command.run(files),
        CliCommand::Write(command) => command.run(files),
        CliCommand::Identify(command) => command.run(),
        CliCommand::IdCtrl(command) => command.run(),
        CliCommand::IdNs(command) => command.run(),
        CliCommand::ListNs(command) => command.run(),
        CliCommand::List(command) => command.run(),
        CliCommand::Bind(command) => command.run(),
        CliCommand::Unbind(command) => command.run(),
        CliCommand::Doctor(command) => command.run(),
        CliCommand::Topology(command) => command.run(),
        CliCommand::Why(command) => command.run(),
        CliCommand::Top(command) => command.run(),
        CliCommand::Witness(command) => command.run(files),
        CliCommand::P2p(command) => command.run(),
        CliCommand::SmartLog(command) => command.run(),
        CliCommand::ErrorLog(command) => command.run(),
        CliCommand::Events(command) => command.run(),
        CliCommand::GetFeature(command) => command.run(),
        CliCommand::SetFeature(command) => command.run(files),
        CliCommand::Flush(command) => command.run(),
        CliCommand::WriteZeroes(command) => command.run(files),
        CliCommand::Compare(command) => command.run(files),
        CliCommand::Dsm(command) => command.run(files),
        CliCommand::Bench(command) => command.run(files),
        CliCommand::Stream(command) => command.run(files),
        CliCommand::Ls(command) => command.run(),
        CliCommand::Cat(command) => command.run(files),
        CliCommand::Cp(command) => command.run(files),
        CliCommand::Stat(command) => command.run(),
        CliCommand::Catalog(command) => command.run(),
        CliCommand::Pack(command) => command.run(),
        CliCommand::Import(command) => command.run(files),
        CliCommand::Verify(command) => command.run(files),
        CliCommand::Manifest(command) => command.run(files),
        CliCommand::Generate(command) => command.run(files),
        CliCommand::Search(command) => command.run(files),
        CliCommand::Pipeline(command) => command.run(files),
        CliCommand::Regs(command) => command.run(),
        CliCommand::GetLog(command) => command.run(),
        CliCommand::AdminPassthru(command) => command.run(files),
        CliCommand::IoPassthru(command) => command.run(files),
        CliCommand::Format(command) => command.run(files),
        CliCommand::Sanitize(command) => command.run(files),
        CliCommand::SanitizeLog(command) => command.run(),
        CliCommand::Reset(command) => command.run(),
        CliCommand::Completions(command) => command.run(command_line()),
        CliCommand::Man(command) => command.run(command_line()),
        #[cfg(feature = "sim")]
        CliCommand::Serve(command) => command.run(),
        #[cfg(feature = "sim")]
        CliCommand::Devices(command) => command.run(),
    }
}

/// Reads the command line. Help and version are printed, and an end without an error.
fn parse(arguments: &[OsString]) -> std::result::Result<(CommandLine, CommandFiles), Result<()>> {
    let command = command_line();
    let name = OsString::from(command.get_name());
    let all = std::iter::once(&name).chain(arguments);
    let parsed = command
        .clone()
        .try_get_matches_from(all)
        .and_then(|matches| Ok((CommandLine::from_arg_matches(&matches)?, matches)));
    let checked = |matches: &ArgMatches| {
        pipeline::check(matches).and_then(|()| apart::check(&command, matches))
    };
    let parsed = parsed.map(|(cli, matches)| match checked(&matches) {
        Ok(inputs) => Ok((cli, CommandFiles::new(device_of(&matches), inputs))),
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
    groups::arrange(CommandLine::command()).mut_subcommand("bench", |bench| {
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
fn device_of(matches: &ArgMatches) -> Option<String> {
    let (_, matches) = matches.subcommand()?;
    let device = matches.try_get_one::<String>("device").ok().flatten();
    device.cloned().or_else(|| device_of(matches))
}
