//! `cargo xtask guest`: tests that need their own kernel, in QEMU.
//!
//! QEMU emulates the processor (no KVM), an IOMMU and the NVMe controllers. The guest runs Linux's
//! driver or ours, and reports over its serial port.

mod apt;
mod audit;
mod boots;
mod cpio;
mod dmar;
mod headers;
mod image;
mod kernel;
mod machine;
mod programs;
mod run;
mod server;
mod tree;

pub use apt::failed;
pub use kernel::Kernel;
pub use tree::Tree;

use crate::kmod;
use boots::{BOOTS, Boot};
use chores::process::Failure;
use chores::report::Counts;
use run::Bench;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Number of guests at a time: the processors of the smallest CI machine.
const BOOTS_AT_ONCE: usize = 2;

/// `cargo xtask guest [--list | --prepare | --shell [BOOT] | [--kernel FOLDER] NAME...]`
pub fn command(args: &[&str]) -> Result<(), Failure> {
    match args {
        ["--list"] => {
            for boot in BOOTS {
                println!("{}", boot.name);
                boot.tests.iter().for_each(|test| println!("    {test}"));
            }
            Ok(())
        }
        ["--prepare"] => bench(None).map(drop),
        ["--shell"] => bench(None)?.shell(&BOOTS[0]),
        ["--shell", name] => {
            let (boot, _) = *chosen(name)?.first().ok_or_else(|| no_such(name))?;
            bench(None)?.shell(boot)
        }
        ["--kernel"] => Err(Failure::new("--kernel wants the folder of a built kernel")),
        ["--kernel", folder, names @ ..] => run_named(names, Some(Path::new(folder))),
        names => run_named(names, None),
    }
}

/// Runs the boots and tests of these names, or all, on Debian's kernel or on the one that was built in `kernel`.
fn run_named(names: &[&str], kernel: Option<&Path>) -> Result<(), Failure> {
    let mut plan: Plan = Vec::new();
    for name in names {
        for (boot, tests) in chosen(name)? {
            // A boot runs once, however many of its tests are named.
            match plan.iter_mut().find(|(known, _)| known.name == boot.name) {
                Some((_, known)) => known.extend(tests),
                None => plan.push((boot, tests.to_vec())),
            }
        }
    }
    if names.is_empty() {
        plan = everything();
    }
    let counts = run_plan(&bench(kernel)?, &plan)?;
    match counts.failed {
        0 => Ok(()),
        _ => Err(Failure::new(format!("guest tests: {counts}"))),
    }
}

/// Boots, each with the tests to run in it.
type Plan = Vec<(&'static Boot, Vec<&'static str>)>;

/// Runs every boot with all its tests. This is the stage of `cargo xtask test`.
pub fn stage() -> Result<Counts, Failure> {
    run_plan(&bench(None)?, &everything())
}

fn everything() -> Plan {
    BOOTS
        .iter()
        .filter(|boot| boot.always)
        .map(|boot| (boot, boot.tests.to_vec()))
        .collect()
}

/// Returns a boot with all its tests, one test in every boot of CI that has it, or `BOOT/TEST`.
fn chosen(name: &str) -> Result<Vec<(&'static Boot, &'static [&'static str])>, Failure> {
    let mut found = Vec::new();
    let (only, test) = match name.split_once('/') {
        Some((boot, test)) => (Some(boot), test),
        None => (None, name),
    };
    for boot in BOOTS {
        if boot.name == name {
            return Ok(vec![(boot, boot.tests)]);
        }
        if only.map_or(boot.always, |only| only == boot.name) {
            let at = boot.tests.iter().position(|known| *known == test);
            found.extend(at.map(|at| (boot, &boot.tests[at..=at])));
        }
    }
    if found.is_empty() {
        return Err(no_such(name));
    }
    Ok(found)
}

fn no_such(name: &str) -> Failure {
    Failure::new(format!(
        "no boot and no guest test is named '{name}'; see: cargo xtask guest --list"
    ))
}

/// Makes or finds the tree while the workspace's programs are built.
fn bench(kernel: Option<&Path>) -> Result<Bench, Failure> {
    let began = Instant::now();
    let (tree, programs) = std::thread::scope(|scope| {
        let tree = scope.spawn(Tree::prepare);
        let programs = programs::build();
        let tree = tree
            .join()
            .unwrap_or_else(|_| Err(Failure::new("the thread that prepares the tree panicked")));
        (tree, programs)
    });
    let tree = tree?;
    let kernel = match kernel {
        None => Kernel::of_debian(&tree)?,
        Some(folder) => Kernel::built(folder, &tree)?,
    };
    let bench = Bench {
        modules: kmod::for_guest(&tree, &kernel)?,
        kernel,
        tree,
        programs: programs?,
    };
    println!("ready after {:.1} s", began.elapsed().as_secs_f64());
    Ok(bench)
}

fn run_plan(bench: &Bench, plan: &[(&Boot, Vec<&str>)]) -> Result<Counts, Failure> {
    let next = AtomicUsize::new(0);
    let total = Mutex::new(Ok(Counts::default()));
    std::thread::scope(|scope| {
        for _ in 0..BOOTS_AT_ONCE.min(plan.len()) {
            scope.spawn(|| {
                while let Some((boot, tests)) = plan.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let outcome = bench.run(boot, tests);
                    let Ok(mut total) = total.lock() else { return };
                    match (outcome, total.as_mut()) {
                        (Ok(outcome), Ok(total)) => {
                            print!("{}", outcome.report);
                            total.add(outcome.counts);
                        }
                        (Err(failure), _) => *total = Err(failure),
                        (_, Err(_)) => {}
                    }
                }
            });
        }
    });
    let total = total
        .into_inner()
        .map_err(|_| Failure::new("a boot's thread panicked"))??;
    println!("guest: {total}");
    Ok(total)
}
