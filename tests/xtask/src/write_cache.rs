//! `cargo xtask write-cache`: measures how much the volatile write cache of a served controller costs writes of 128
//! KiB.

use chores::process::{Failure, cargo, check, root};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Runs of each kind, in turns.
const RUNS: usize = 5;
/// `wc=on` has at least this share of the rate of `wc=off`.
const LEAST: f64 = 0.9;
/// Time limit for a server to begin to listen.
const PATIENCE: Duration = Duration::from_secs(20);

/// Builds the tool and measures both for `seconds` each time.
pub fn command(words: &[&str]) -> Result<(), Failure> {
    let seconds = match words {
        [] => 3,
        ["--seconds", number] => number
            .parse::<u32>()
            .map_err(|_| Failure::new("write-cache --seconds: give a number"))?,
        _ => return Err(Failure::new("usage: cargo xtask write-cache [--seconds N]")),
    };
    check(cargo().args(["build", "--release", "--package", "nvme-gpu"]))?;
    let folder = root().join("target/write-cache");
    std::fs::create_dir_all(&folder)
        .map_err(|error| Failure::new(format!("{}: {error}", folder.display())))?;
    let mut rates = [[0.0; RUNS]; 2];
    for run in 0..RUNS {
        for (rates, cache) in rates.iter_mut().zip(["on", "off"]) {
            rates[run] = rate(&folder, cache, seconds)?;
            println!("wc={cache}: {:.0} MB/s", rates[run]);
        }
    }
    let [on, off] = rates.map(median);
    let ratio = on / off;
    println!(
        "wc=on {on:.0} MB/s, wc=off {off:.0} MB/s, ratio {ratio:.2} (medians of {RUNS}, in turns)"
    );
    if ratio < LEAST {
        return Err(Failure::new(format!("write-cache: less than {LEAST}")));
    }
    Ok(())
}

/// Megabytes per second of sequential writes of 128 KiB to a new image behind a server.
fn rate(folder: &Path, cache: &str, seconds: u32) -> Result<f64, Failure> {
    let tool = root().join("target/release/nvme-gpu");
    let (socket, image) = (folder.join("socket"), folder.join("image"));
    // Absent on the first run.
    let _ = std::fs::remove_file(&socket);
    let _ = std::fs::remove_file(&image);
    let device = format!("sim:{}?size=256MiB&wc={cache}", image.display());
    let mut serve = Command::new(&tool);
    serve.args(["serve", "--quiet", "--device", &device, "--socket"]);
    serve
        .arg(&socket)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    let failed = |error: std::io::Error| Failure::new(format!("{}: {error}", tool.display()));
    let _server = Server(serve.spawn().map_err(failed)?);
    let begin = Instant::now();
    while !socket.exists() {
        if begin.elapsed() > PATIENCE {
            return Err(Failure::new("write-cache: the server does not listen"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut bench = Command::new(&tool);
    bench.args(["bench", "--quiet", "--json", "--allow-write"]);
    bench.args(["--rw", "write", "--bs", "128KiB", "--depth", "32"]);
    bench.args(["--runtime", &format!("{seconds}s"), "--device"]);
    bench.arg(format!("vfio-user:{}", socket.display()));
    let text = chores::process::output(&mut bench)?;
    rate_of(&text).ok_or_else(|| Failure::new(format!("bench says no rate:\n{text}")))
}

/// Returns the rate of writes in the tool's JSON, in megabytes per second.
fn rate_of(text: &str) -> Option<f64> {
    let (_, writes) = text.split_once("\"write\":{")?;
    let (_, rate) = writes.split_once("\"bw_bytes\":")?;
    let rate: f64 = rate.split([',', '}']).next()?.parse().ok()?;
    Some(rate / 1e6).filter(|rate| *rate > 0.0)
}

fn median(mut rates: [f64; RUNS]) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[RUNS / 2]
}

/// A server, ended when it is dropped.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // The server may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_that_of_writes_and_the_median_is_the_middle_one() {
        let text = r#"{"read":{"bw_bytes":7},"write":{"io_bytes":9,"bw_bytes":5000000,"bw":1}}"#;
        assert_eq!(rate_of(text), Some(5.0));
        assert_eq!(rate_of(r#""write":{"bw_bytes":0}"#), None);
        assert_eq!(median([9.0, 1.0, 5.0, 2.0, 7.0]), 5.0);
    }
}
