//! Tests of the node of the module nvme_gpu, by its calls alone: each subcommand is one test and exits with 0 if it
//! passed.

mod bar;
mod calls;
mod compat;
mod errors;
mod fuse;
mod fuzz;
mod limits;
mod machine;
mod memory;
mod node;
mod nvme;
mod partial;
mod pulled;
mod refuse;
mod stops;
mod waits;

use std::process::ExitCode;

const USAGE: &str = "\
usage: node-tests <test> BDF
  refused BDF ERRNO       opening ends with ERRNO, and has done nothing
  opens BDF yes|no        a command is answered, behind an IOMMU or not
  line BDF ACTION         nothing comes on the line of ACTION in /proc/interrupts
  calls BDF SECONDS       calls with good and bad arguments
  fuzz BDF SECONDS        the same by threads, with kills, resets and unbinds under them
  limits BDF              no more memory than RLIMIT_MEMLOCK lets a user lock
  many BDF COUNT [FLUSH]  COUNT mappings, of 65535 that there can be; FLUSH, an event of the IOMMU, is counted at the end
  partial BDF             a MAP that fails half-way
  deaf BDF                hold a function until the module takes it away
  race BDF ROUNDS         unbinds beside processes that map the BAR
  resets BDF ROUNDS       reads of the BAR while the function is reset
  fork BDF                a child has no BAR
  waits BDF               calls whose memory another provides when it likes, by userfaultfd and FUSE
  by-system BDF           a reset by an administrator
  by-sleep BDF            a sleep of the machine's devices
  by-error BDF PORT ERROR an error of the bus at PORT, a device of QEMU's, from which the system recovers
  lost BDF PORT ERROR     one from which it does not
  dead BDF PORT ERROR     one after which the link stays down
  pulled BDF PORT         a function that is pulled out of its slot below PORT while it is open
  next-opener BDF ROUNDS  an opener right after another one hears of its events
  without-reset BDF       a function that has no reset
  no-peer BDF             pages of a program where a peer's memory is asked for
  read-only BDF           memory that the program may not write
  untold BDF              a mapping whose handle cannot be told
  compat BDF              calls of a program of 32 bits
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let number = |text: &str| {
        text.parse::<u64>()
            .map_err(|_| format!("'{text}' is not a number"))
    };
    let result = match words.as_slice() {
        ["refused", bdf, errno] => {
            number(errno).and_then(|errno| refuse::refused(bdf, errno as i32))
        }
        ["opens", bdf, strict @ ("yes" | "no")] => refuse::opens(bdf, *strict == "yes"),
        ["line", bdf, action] => refuse::line(bdf, action),
        ["calls", bdf, seconds] => number(seconds).and_then(|n| calls::calls(bdf, n)),
        ["fuzz", bdf, seconds] => number(seconds).and_then(|n| fuzz::run(bdf, n)),
        ["limits", bdf] => limits::run(bdf),
        ["many", bdf, count] => number(count).and_then(|n| limits::many(bdf, n, None)),
        ["many", bdf, count, flush] => {
            number(count).and_then(|n| limits::many(bdf, n, Some(flush)))
        }
        ["partial", bdf] => partial::run(bdf),
        ["deaf", bdf] => calls::deaf(bdf),
        ["race", bdf, rounds] => number(rounds).and_then(|n| bar::race(bdf, n)),
        ["resets", bdf, rounds] => number(rounds).and_then(|n| bar::resets(bdf, n)),
        ["fork", bdf] => bar::fork(bdf),
        ["waits", bdf] => waits::run(bdf),
        ["by-system", bdf] => stops::by_system(bdf),
        ["by-sleep", bdf] => stops::by_sleep(bdf),
        ["by-error", bdf, port, error] => errors::recovered(bdf, port, error),
        ["lost", bdf, port, error] => errors::lost(bdf, port, error),
        ["dead", bdf, port, error] => errors::dead(bdf, port, error),
        ["pulled", bdf, port] => pulled::run(bdf, port),
        ["next-opener", bdf, rounds] => number(rounds).and_then(|n| stops::next_opener(bdf, n)),
        ["without-reset", bdf] => stops::without_reset(bdf),
        ["no-peer", bdf] => refuse::no_peer(bdf),
        ["read-only", bdf] => refuse::read_only(bdf),
        ["untold", bdf] => stops::untold(bdf),
        ["compat", bdf] => compat::run(bdf),
        _ => Err(USAGE.to_owned()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(cause) => {
            eprintln!("node-tests: {cause}");
            ExitCode::FAILURE
        }
    }
}
