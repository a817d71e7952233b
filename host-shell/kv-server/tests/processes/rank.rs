//! A process of a test: this program again, which obeys lines of its input.

use crate::{Gate, PATIENCE, Scratch, Stage, load, request, shared, store};
use nvme_kv::{KvError, StoreOutcome};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

/// What the process says to the test begins like this; others are lines of the test program.
const MARK: &str = "rank: ";
const FOLDER: &str = "NVME_KV_RANK_FOLDER";

pub fn say(text: &str) {
    println!("{MARK}{text}");
}

/// A process that shares an area; it is killed when this is dropped.
pub struct Rank {
    child: Child,
    input: ChildStdin,
    said: Receiver<String>,
}

impl Rank {
    /// Starts a process that opens the area; its answer to that is the first one.
    pub fn start(scratch: &Scratch, model: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rank::a_process_obeys_its_test", "--nocapture"])
            .env(FOLDER, &scratch.0)
            .env("NVME_KV_RANK_MODEL", model)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, said) = channel();
        std::thread::spawn(move || {
            let lines = output.lines().map_while(Result::ok);
            // The first one stands behind the name of the test.
            let marked = lines.filter_map(|line| Some(line.split_once(MARK)?.1.to_owned()));
            for line in marked {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let input = child.stdin.take().unwrap();
        Self { child, input, said }
    }

    /// Starts a process that opens the area, which succeeds.
    pub fn opened(scratch: &Scratch) -> Self {
        let rank = Self::start(scratch, "llama");
        let said = rank.listen();
        assert!(said.starts_with("open"), "{said}");
        rank
    }

    pub fn tell(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    pub fn listen(&self) -> String {
        self.said
            .recv_timeout(PATIENCE)
            .expect("the process answers")
    }

    pub fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.listen()
    }

    /// Stops the process, which is stopped when this returns.
    pub fn stop(&self) {
        let id = Pid::from_child(&self.child);
        kill_process(id, Signal::STOP).unwrap();
        waitpid(Some(id), WaitOptions::UNTRACED).unwrap();
    }

    pub fn go_on(&self) {
        kill_process(Pid::from_child(&self.child), Signal::CONT).unwrap();
    }

    /// Ends the process as `kill -9` does.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn word_of(error: &KvError) -> String {
    format!("{}: {error}", error.code())
}

fn outcome_of(outcome: nvme_kv::Result<StoreOutcome>) -> String {
    outcome.map_or_else(|error| word_of(&error), |outcome| format!("{outcome:?}"))
}

/// Does nothing in a run of the tests; it is what [`Rank::start`] starts.
#[test]
fn a_process_obeys_its_test() {
    let Some(folder) = std::env::var_os(FOLDER) else {
        return;
    };
    let model = std::env::var("NVME_KV_RANK_MODEL").unwrap();
    let gate = Arc::new(Gate::default());
    let pages = match shared(request(Path::new(&folder), &model), Arc::clone(&gate)) {
        Ok(pages) => pages,
        Err(error) => return say(&word_of(&error)),
    };
    say(&format!("open {}", pages.formatted().unwrap_or_default()));
    let mut pins = Vec::new();
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        let numbers: Vec<u64> = words[1..]
            .iter()
            .filter_map(|word| word.parse().ok())
            .collect();
        let keys: Vec<_> = numbers
            .iter()
            .map(|number| pages.key(&number.to_le_bytes(), 0))
            .collect();
        match words[0] {
            "store" => {
                let outcomes = numbers
                    .iter()
                    .map(|number| outcome_of(store(&pages, *number)));
                say(&outcomes.collect::<Vec<_>>().join(" "));
            }
            "load" => say(&load(&pages, numbers[0])
                .map_or_else(|error| word_of(&error), |length| length.to_string())),
            "found" => {
                let found = pages
                    .lengths(&keys)
                    .into_iter()
                    .zip(&numbers)
                    .filter(|(length, _)| length.is_some());
                say(&found
                    .map(|(_, number)| number.to_string())
                    .collect::<Vec<_>>()
                    .join(" "));
            }
            "pin" => {
                pins.push(pages.pin_prefix(&keys));
                say(&pins.last().unwrap().len().to_string());
            }
            "unpin" => {
                pins.clear();
                say("unpinned");
            }
            "owner" => {
                let (is_owner, epoch) = pages.owner().unwrap();
                say(&format!(
                    "{} {epoch}",
                    if is_owner { "owner" } else { "client" }
                ));
            }
            "hold" => {
                let stages = [
                    Stage::Read,
                    Stage::Write,
                    Stage::Flush,
                    Stage::BeforeCommit,
                    Stage::AfterCommit,
                ];
                gate.set(
                    stages
                        .into_iter()
                        .find(|stage| format!("{stage:?}") == words[1]),
                );
                say("ready");
            }
            "mix" => {
                let mut random = numbers[0];
                let (mut found, mut stored) = (0, 0);
                for _ in 0..numbers[1] {
                    random = random
                        .wrapping_mul(0x5851_F42D_4C95_7F2D)
                        .wrapping_add(numbers[0] * 2 + 1);
                    let number = (random >> 33) % (crate::SLOTS * 2);
                    match load(&pages, number) {
                        Ok(_) => found += 1,
                        Err(error) => {
                            assert!(error.is_miss(), "{error}");
                            store(&pages, number).unwrap();
                            stored += 1;
                        }
                    }
                }
                say(&format!("mixed {found} {stored}"));
            }
            "close" => {
                pages.close();
                return say("closed");
            }
            other => panic!("no command {other}"),
        }
    }
}
