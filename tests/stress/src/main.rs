//! `nvme-stress`: uses the queues of a GPU from host threads on real cores, until a check fails.
//!
//! `sim`: shared queues and teams over rings of 2 to 16 entries against the simulator's threads, with counters that
//! begin at 0 and just below 2^16, 2^31 and 2^32. `plain`: a controller of this program, with data that are not atomic,
//! for ThreadSanitizer. Neither needs another program.

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
