//! `cargo xtask`: the project's chores, with the standard library alone.

mod fio;
mod gpu_test;
mod install_c;
mod model;
mod packages;
mod release;
mod simulate;
mod site;
mod test;
mod wording;
mod write_cache;

use chores::process::{self, Failure};
use chores_coverage::{coverage, python};
use chores_fuzz::fuzz;
use chores_guest::{guest, kmod};
use chores_mutants::{loom, planted, stress};
use chores_ptx as ptx;
use chores_results::{figures, results, witness};
use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask <command>

  check              formatting, the rates of tests/wording.txt, clippy, unit tests of core, simulator and host
                     library: before every commit; installs nothing
  test [--ci] [--list | STAGE...]
                     install what is missing (as root), then run everything or the named stages:
                     formatting, clippy, tests, docs, feature matrix, loom, PTX, fuzzing, demo, guests.
                     --ci: a skipped stage or test is a failure
  ptx [--refresh [--accept-fences]]
                     build the GPU kernels with rustc's NVPTX back end and check the PTX;
                     --refresh writes what is committed of it, unless a fence or a scope has changed;
                     --accept-fences: writes the table of fences, too, after a review
  gpu-test --bundle [FILE]
                     build one file with the GPU tests and everything that they need;
                     with other arguments, run it here: gpu-test --help
  guest [--list | --prepare | --shell [BOOT] | [--kernel FOLDER] NAME...]
                     boot Linux in QEMU and run the tests that need a kernel of their own;
                     --prepare: only download and build what they need; --kernel: on the kernel that
                     was built in FOLDER
  kmod build [--guest] | install | remove
                     build the kernel module against the headers of the running kernel (--guest: of
                     the guests' kernel); install it by dkms and load it, as root; take it away
  loom [--deeper N | --mutants [--part K/N] [NAME...]]
                     model-check the memory ordering of the queues; --deeper: with N more
                     preemptions; --mutants: weaken each order in turn, leave out and move each
                     statement that stores, rings or locks: some model must fail
  simulate [--seeds N] [--base B] | --seed S
                     drivers, controller and faults in virtual time; --seed: one seed, with its trace
  stress [--commands N | --minutes M]
                     the shared and collective queues as threads on real cores, tiny rings, against
                     the simulator; --tsan: under ThreadSanitizer; --mutants: weaken each order
                     there; --bundle: one file to run elsewhere
  fuzz [--minutes M | --build | --coverage | --bundle [DIR]] [TARGET...]
                     fuzz every target (or some) for M minutes each, default 1; --build: only build
                     them; --coverage: the lines that their corpora reach; --bundle: programs for a machine without Rust
  coverage           lines of each library that the tests reach; fails below tests/coverage.txt
  record SUBJECT -- COMMAND...
                     run a command and add what it said last to docs/results/runs.tsv
  results [NAME...]  write docs/results/README.md: the runs of the last day; with names print the tables of
                     docs/results/NAME.tsv, the figures behind the pages, or of `runs`
  witness-check FILE...
                     check files that `nvme-gpu witness` wrote, and print their rows for docs/hardware.md
  install-c PREFIX [--built FOLDER]
                     build the C interface and install headers, libraries, pkg-config file and CMake
                     package under PREFIX; --built: from libraries that cargo has built there
  fio PREFIX [--built FOLDER]
                     as install-c, and the engine for the fio that is installed, built with its headers
                     from the source package
  release [--list | [--for x86_64|aarch64] STEP...]
                     make wheels, packages of Debian, archives, bills of materials and checksums for
                     x86-64 and aarch64, and try each in clean systems; uploads nothing. By hand, on
                     Debian, as root; takes an hour or more
  site               make the documents as a book with search, and the references of the Rust libraries, of Python and of
                     C, in target/site; needs mdbook, and installs pdoc; CI does not run it
  write-cache [--seconds N]
                     writes of 128 KiB to a served controller with and without its write cache,
                     in turns: with it they have 0.9 of the rate
  python --asan | --coverage
                     the tests of the Python face with its extension module under AddressSanitizer;
                     the lines of the package that they reach: fails below the floor in pyproject.toml
  planted [NAME...]  plant each bug of tests/mutants (or those whose names contain NAME): its test
                     has to fail, and the protocol auditor to find it
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    // A recorded command runs in the folder in which it was started, on any machine.
    if let ["record", rest @ ..] = words.as_slice() {
        return end(results::record(rest));
    }
    let result = std::env::set_current_dir(process::root())
        .map_err(|error| Failure::new(format!("cannot enter the workspace: {error}")))
        .and_then(|()| match words.as_slice() {
            ["check"] => test::quick(),
            ["test", rest @ ..] => test::command(rest),
            ["ptx", rest @ ..] => ptx::command(rest),
            ["gpu-test", rest @ ..] => gpu_test::command(rest),
            ["loom", rest @ ..] => loom::command(rest),
            ["guest", rest @ ..] => guest::command(rest),
            ["fio", rest @ ..] => fio::command(rest),
            ["kmod", rest @ ..] => kmod::command(rest),
            ["install-c", rest @ ..] => install_c::command(rest),
            ["release", rest @ ..] => release::command(rest),
            ["site", rest @ ..] => site::command(rest),
            ["stress", rest @ ..] => stress::command(rest),
            ["simulate", rest @ ..] => simulate::command(rest),
            ["coverage"] => coverage::command(),
            ["fuzz", rest @ ..] => fuzz::command(rest),
            ["python", rest @ ..] => python::command(rest),
            ["planted", rest @ ..] => planted::command(rest),
            ["write-cache", rest @ ..] => write_cache::command(rest),
            ["results"] => results::write_page(),
            ["results", names @ ..] => figures::command(names),
            ["witness-check", rest @ ..] => witness::command(rest),
            [] | ["help" | "-h" | "--help"] => {
                print!("{USAGE}");
                Ok(())
            }
            _ => Err(Failure::new(format!(
                "unknown command: {}\n\n{USAGE}",
                words.join(" ")
            ))),
        });
    end(result)
}

fn end(result: Result<(), process::Failure>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("xtask: {failure}");
            ExitCode::FAILURE
        }
    }
}
