//! Gathers over drives in stripes, whose reads the GPU submits to all of them: every row, also rows that begin in one
//! stripe and end in the next, and the results of rows when a member fails.

mod owned;

use crate::bench::Bench;
use crate::distinct;
use crate::gather::{Drive, Job, dice, fault_timeout, outages_of, shapes_of, text};
use crate::hazards::{current, outlives, replay};
use crate::lifetimes::free_bytes;
use crate::limits::limit;
use crate::report::{Outcome, Report};
use nvme_gpu_kernel::rows::code;
use nvme_host::cuda::RowTable;
use std::time::{Duration, Instant};

const STRIPE_BYTES: u64 = 32 << 10;
const MEMBERS: u64 = 3;
/// The member with a fault.
const BAD: u64 = 1;
/// Limit of the GPU memory that may be missing afterwards: less than the words of these stores take, and room for one
/// of the driver's allocations of 2 MiB.
const MOST_LOST: usize = 4 << 20;

pub fn all(report: &mut Report, bench: &Bench) {
    report.test("stripes/shapes", |_| {
        let drive = open(bench, "", limit())?;
        let path = drive.store().path();
        match (path.data, path.tier) {
            ("gpu", Some(_)) => shapes_of(&drive, 3),
            _ => Err(format!("{path:?}")),
        }
    });
    report.test("stripes/outages", |_| {
        let timeout = Duration::from_millis(60) * bench.patience as u32;
        let drive = open(bench, "drop@op=read,every=1500", timeout)?;
        outages_of(bench, &drive, 300)
    });
    for (name, fault, comes_back) in [
        ("status", "status:0x281@op=read,nth=7", true),
        ("dropped", "drop@op=read,nth=7", true),
        ("dead-cfs", "cfs@op=read,nth=7", true),
        ("all-ones", "allones@op=read,nth=7", false),
    ] {
        report.test(&format!("stripes/fault/{name}"), |_| {
            fault_of(bench, fault, comes_back)
        });
    }
    report.test("stripes/left", |_| left(bench));
    owned::all(report, bench);
    distinct::of_stripes(report, bench);
    report.case("stripes/graph/replay", |options| {
        let rounds = (options.commands / 1000).clamp(3, 1000);
        let drive = open(bench, "", limit());
        drive.and_then(|drive| replay(&drive, rounds)).into()
    });
    report.case("stripes/graph/outlives-its-store", |_| {
        open(bench, "", limit())
            .and_then(|drive| outlives(drive, 300))
            .into()
    });
}

/// Opens drives with blocks of two sizes, one of which may have a fault. They have too few queues for blocks to own.
pub fn open(bench: &Bench, fault: &str, timeout: Duration) -> Outcome<Drive> {
    open_with(bench, 8, (fault, timeout))
}

/// Opens the same with `queues` queues of each drive.
fn open_with(bench: &Bench, queues: u32, (fault, timeout): (&str, Duration)) -> Outcome<Drive> {
    let members = (0..MEMBERS).map(|member| {
        let block = if member == 2 { 4096 } else { 512 };
        let fault = match (member, fault) {
            (BAD, "") | (0 | 2.., _) => String::new(),
            (_, fault) => format!("&fault={fault}"),
        };
        format!("sim:mem?size=4MiB&block={block}&queues={queues}&threads=2{fault}")
    });
    let members = members.collect::<Vec<_>>().join("|");
    let name = format!("stripe:{members}?stripe={}KiB", STRIPE_BYTES >> 10);
    Drive::open(bench, &name, timeout)
}

/// Returns whether row `id` needs the member with the fault.
pub fn needs_bad(table: &RowTable, id: i64) -> bool {
    let first = table.first_byte + id as u64 * u64::from(table.row_bytes);
    let last = first + u64::from(table.row_bytes) - 1;
    (first / STRIPE_BYTES..=last / STRIPE_BYTES).any(|stripe| stripe % MEMBERS == BAD)
}

/// Rows of one member fail, which is named; rows of the others never do.
fn fault_of(bench: &Bench, fault: &str, comes_back: bool) -> Outcome<String> {
    let timeout = fault_timeout(bench, fault);
    let drive = open(bench, fault, timeout)?;
    // Rows are no whole blocks: about every eighth lies on two members.
    let table = drive.table(100, 5000);
    faults_of(&drive, (table, 600), comes_back)
}

/// The same for gathers of `count` rows of `table`.
pub fn faults_of(
    drive: &Drive,
    (table, count): (RowTable, usize),
    comes_back: bool,
) -> Outcome<String> {
    let mut throw = dice(9);
    let (begin, mut failed, mut launches) = (Instant::now(), 0, 0);
    loop {
        let ids = (0..count).map(|_| throw(table.rows) as i64).collect();
        let job = Job::new(drive, table, ids, true, 0)?;
        let (codes, failures) = drive.run_and_tell(&job)?;
        launches += 1;
        let mut wrong = job.ids().iter().zip(&codes);
        let wrong = wrong.find(|(id, code)| **code != code::OK && !needs_bad(&table, **id));
        if let Some((id, code)) = wrong {
            return Err(format!("row {id} of a member that works: {code}"));
        }
        let bad = codes.iter().filter(|code| **code != code::OK).count();
        if bad > 0 && failures.member != Some(BAD as u32) {
            return Err(format!("{failures:?}, but member {BAD} failed"));
        }
        failed += bad;
        let asked = job.ids().iter().zip(&codes);
        let mut of_bad = asked.filter(|(id, _)| needs_bad(&table, **id));
        let is_over = match comes_back {
            true => bad == 0,
            false => of_bad.all(|(_, code)| *code == code::GONE),
        };
        if failed > 0 && is_over {
            return Ok(format!("{failed} rows failed in {launches} gathers"));
        }
        if begin.elapsed() > limit() {
            return Err(format!("{bad} rows fail after {:?}: {codes:?}", limit()));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Launches that nobody waits for, of stores that are closed: their memory is freed.
fn left(bench: &Bench) -> Outcome<String> {
    const ROUNDS: usize = 20;
    let once = || -> Outcome<()> {
        let drive = open(bench, "", limit())?;
        let job = Job::new(&drive, drive.table(0, 4096), (0..64).collect(), true, 0)?;
        for _ in 0..8 {
            drop(job.start(&drive, &drive.stream)?);
        }
        drive.stream.finish().map_err(text)?;
        job.check(&drive).map(drop)
    };
    let drive = open(bench, "", limit())?;
    current(&drive)?;
    once()?;
    let before = free_bytes()?;
    for _ in 0..ROUNDS {
        once()?;
    }
    let lost = before.saturating_sub(free_bytes()?);
    match lost < MOST_LOST {
        true => Ok(format!("{ROUNDS} stores")),
        false => Err(format!("{lost} bytes did not come back")),
    }
}
