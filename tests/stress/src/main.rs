//! `nvme-stress`: the queues that a GPU uses, as host threads on real cores, until something breaks.
//!
//! `sim`: shared queues and teams over rings of 2 to 16 entries against the simulator's own threads, with
//! counters that begin at 0 and just below 2^16, 2^31 and 2^32. `plain`: a controller by hand, with data
//! that is no atomic, for ThreadSanitizer. Neither needs anything but this program.

mod options;
mod plain;
mod rounds;
mod sim;
mod work;

use std::process::ExitCode;

fn main() -> ExitCode {
    let options = match options::parse(std::env::args().skip(1)) {
        Ok(Some(options)) => options,
        Ok(None) => {
            println!("{}", options::USAGE);
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(2);
        }
    };
    // The threads beside one that panicked would wait for it.
    std::panic::set_hook(Box::new(|panic| {
        eprintln!("error: {}: {panic}", rounds::current());
        std::process::exit(1);
    }));
    match rounds::run(&options) {
        Ok(summary) => {
            println!("{summary}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
