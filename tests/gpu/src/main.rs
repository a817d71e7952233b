//! `gpu-test`: the kernels on a real GPU, against the simulated controller in this process.
//!
//! One file with everything inside; any x86-64 Linux with an NVIDIA driver runs it. See docs/gpu-test.md.

mod admin;
mod audit;
mod bench;
mod by_host;
mod captured;
mod compute;
mod data;
mod distinct;
mod example;
mod experts;
mod flash;
mod gather;
mod halves;
mod hazards;
mod kept;
mod late;
mod layers;
mod lifetimes;
mod limits;
mod linear;
mod litmus;
mod matmul;
mod matrix;
mod model;
mod ops;
mod owned;
mod paged;
mod product;
mod ranges;
mod reading;
mod report;
mod rig;
mod sanitizer;
mod scaled;
mod scatter;
mod search;
mod sim;
mod stations;
mod stripes;
mod tier3;
mod tokens;
mod two_gpus;
mod volume;
mod wide;

use bench::Bench;
use report::{Options, Report};
use std::process::ExitCode;
use std::time::Duration;

const USAGE: &str = "\
usage: gpu-test [--json] [--list] [--quick] [--gpu N] [--commands N] [--volume N] [--litmus N]
                [--patience N] [--limit N] [--seconds N] [--image FILE] [NAME...]

  NAME            only tests whose name contains one of the words
  --list          print the names
  --json          one JSON object instead of lines
  --quick         --commands 20000 --volume 10000000 --litmus 20000
  --commands N    commands of each cell of the matrix, 1000000 without
  --volume N      commands of the two long runs, 1000000000 without
  --litmus N      messages that each litmus case has to see, 200000 without
  --patience N    factor on every deadline, for checking tools; 1 without
  --limit N       seconds that an operation may take before the program gives up, 60 without
  --seconds N     skip the tests that would begin later; 520 without
  --gpu N         which GPU, 0 without
  --image FILE    nvme-gpu-kernel/examples/cuda-histogram as nvcc built it, to be tested too

Exit status: 0 all passed, 1 something failed, 2 usage, 3 no GPU.";

fn options(mut words: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options {
        json: false,
        only: Vec::new(),
        gpu: 0,
        commands: 1_000_000,
        volume: 1_000_000_000,
        litmus: 200_000,
        patience: 1,
        image: None,
        limit: 60,
        seconds: 520,
        list: false,
    };
    while let Some(word) = words.next() {
        let mut number = || {
            let text = words.next().ok_or(format!("{word} needs a number"))?;
            let number = text
                .parse::<u64>()
                .ok()
                .filter(|&n| n > 0 || word == "--gpu");
            number.ok_or(format!("{word} {text}: not a number"))
        };
        match word.as_str() {
            "--json" => options.json = true,
            "--list" => options.list = true,
            "--quick" => {
                (options.commands, options.volume) = (20_000, 10_000_000);
                options.litmus = 20_000;
            }
            "--image" => options.image = Some(words.next().ok_or("--image needs a file")?),
            "--gpu" => options.gpu = number()? as u32,
            "--commands" => options.commands = number()?,
            "--volume" => options.volume = number()?,
            "--litmus" => options.litmus = number()?,
            "--limit" => options.limit = number()?,
            "--seconds" => options.seconds = number()?,
            "--patience" => options.patience = number()?,
            word if word.starts_with('-') => return Err(format!("no option {word}\n\n{USAGE}")),
            _ => options.only.push(word),
        }
    }
    Ok(options)
}

fn main() -> ExitCode {
    if std::env::args().any(|word| word == "--help" || word == "-h") {
        println!("{USAGE}");
        return ExitCode::SUCCESS;
    }
    let options = match options(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(2);
        }
    };
    let mut report = Report::new(options);
    let limit = Duration::from_secs(report.options().limit);
    limits::set(limit, report.progress());
    let bench = match Bench::open(report.options()) {
        Ok(bench) => bench,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(3);
        }
    };
    let gpu = bench.gpu.describe();
    // Tests that a kernel which never ends would prevent come first.
    example::all(&mut report, &bench);
    data::all(&mut report, &bench);
    gather::all(&mut report, &bench);
    distinct::all(&mut report, &bench);
    owned::all(&mut report, &bench);
    kept::all(&mut report, &bench);
    halves::all(&mut report, &bench);
    stations::all(&mut report, &bench);
    scatter::all(&mut report, &bench);
    hazards::all(&mut report, &bench);
    stripes::all(&mut report, &bench);
    by_host::all(&mut report, &bench);
    lifetimes::all(&mut report, &bench);
    captured::all(&mut report, &bench);
    ranges::all(&mut report, &bench);
    compute::all(&mut report, &bench);
    matmul::all(&mut report, &bench);
    experts::all(&mut report, &bench);
    flash::all(&mut report, &bench);
    linear::all(&mut report, &bench);
    paged::all(&mut report, &bench);
    product::all(&mut report, &bench);
    search::all(&mut report, &bench);
    wide::all(&mut report, &bench);
    scaled::all(&mut report, &bench);
    layers::all(&mut report, &bench);
    model::all(&mut report, &bench);
    two_gpus::all(&mut report, &bench);
    tier3::all(&mut report, &bench);
    late::all(&mut report, &bench);
    matrix::all(&mut report, &bench);
    ops::all(&mut report, &bench);
    volume::all(&mut report, &bench);
    tokens::all(&mut report, &bench);
    litmus::all(&mut report, &bench);
    sanitizer::all(&mut report);
    match report.finish(&gpu) {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}
