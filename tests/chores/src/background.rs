//! Runs other `cargo xtask` processes beside this one, a few at a time. Their output is kept in files until it is asked
//! for.

use crate::process::{Failure, target_dir};
use crate::tools::on_path;
use std::collections::VecDeque;
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Number of processes that run at the same time. Most of them start two processes each.
const AT_ONCE: usize = 2;
/// Pause between two looks at a process.
const PAUSE: Duration = Duration::from_millis(50);

/// A process to be started.
struct QueuedProcess {
    name: String,
    command: Command,
}

/// The end of a process.
#[derive(Clone)]
pub struct EndedProcess {
    pub success: bool,
    /// Output of the process.
    pub text: String,
    pub seconds: f64,
    /// Seconds of processor time, its children's included.
    pub used: f64,
}

/// Processes in the order in which they are to be started. They get the processor time that other programs leave, until
/// a caller waits for them.
pub struct ProcessQueue {
    shared: Arc<QueueProgress>,
}

#[derive(Default)]
struct QueueProgress {
    state: Mutex<ProcessStates>,
    changed: Condvar,
}

#[derive(Default)]
struct ProcessStates {
    todo: VecDeque<QueuedProcess>,
    ended: Vec<(String, Result<EndedProcess, String>)>,
    /// Names of those that somebody waits for.
    wanted: Vec<String>,
    /// Seconds of processor time of all that ended.
    used: f64,
}

impl ProcessQueue {
    /// Starts this program once for each name and its words.
    pub fn start(jobs: Vec<(String, Vec<&str>)>) -> Result<Self, Failure> {
        let jobs = jobs.into_iter().map(|(name, words)| {
            let mut command = lowered()?;
            command.args(words);
            Ok(QueuedProcess { name, command })
        });
        Ok(Self::of(jobs.collect::<Result<_, Failure>>()?))
    }

    fn of(todo: VecDeque<QueuedProcess>) -> Self {
        let shared = Arc::new(QueueProgress::default());
        shared.lock().todo = todo;
        for _ in 0..AT_ONCE {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || shared.work());
        }
        Self { shared }
    }

    /// Takes one away that has not been started.
    pub fn take(&self, name: &str) -> bool {
        let todo = &mut self.shared.lock().todo;
        let at = todo.iter().position(|job| job.name == name);
        at.is_some_and(|at| todo.remove(at).is_some())
    }

    /// Waits for the end of one that was given to [`ProcessQueue::start`] and not taken away.
    pub fn wait(&self, name: &str) -> Result<EndedProcess, Failure> {
        let mut state = self.shared.lock();
        state.wanted.push(name.to_string());
        loop {
            if let Some((_, done)) = state.ended.iter().find(|(known, _)| known == name) {
                return done.clone().map_err(Failure::new);
            }
            let woken = self.shared.changed.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns the processor time in seconds of those children of this process that have ended and are not in this
    /// queue.
    pub fn others_seconds(&self) -> f64 {
        let state = self.shared.lock();
        children_seconds() - state.used
    }
}

impl QueueProgress {
    fn lock(&self) -> MutexGuard<'_, ProcessStates> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs one process after the other until none is left.
    fn work(&self) {
        let next = || self.lock().todo.pop_front();
        while let Some(job) = next() {
            let name = job.name.clone();
            let done = StartedProcess::start(job)
                .and_then(|background| self.wait(background))
                .map_err(|failure| failure.to_string());
            self.lock().ended.push((name, done));
            self.changed.notify_all();
        }
    }

    /// Waits for the end of a process. Its processor times are read just before `wait`, after which they are lost.
    fn wait(&self, mut one: StartedProcess) -> Result<EndedProcess, Failure> {
        let pid = one.child.id();
        while !has_ended(pid) {
            std::thread::sleep(PAUSE);
            if self.lock().wanted.contains(&one.name) {
                raise(pid);
            }
        }
        let mut state = self.lock();
        let used = used_seconds(pid);
        let status = one.child.wait();
        state.used += used;
        drop(state);
        let name = &one.name;
        let status = status.map_err(|error| Failure::new(format!("{name}: {error}")))?;
        let bytes = std::fs::read(&one.log)
            .map_err(|error| Failure::new(format!("{name}: {}: {error}", one.log.display())))?;
        Ok(EndedProcess {
            success: status.success(),
            text: String::from_utf8_lossy(&bytes).into_owned(),
            seconds: one.began.elapsed().as_secs_f64(),
            used,
        })
    }
}

/// One that was started.
struct StartedProcess {
    name: String,
    child: Child,
    log: PathBuf,
    began: Instant,
}

impl StartedProcess {
    fn start(job: QueuedProcess) -> Result<Self, Failure> {
        let QueuedProcess { name, mut command } = job;
        let folder = target_dir().join("xtask");
        let log = folder.join(format!("{name}.log"));
        let failed = |error: std::io::Error| Failure::new(format!("{}: {error}", log.display()));
        std::fs::create_dir_all(&folder).map_err(failed)?;
        let out = File::create(&log).map_err(failed)?;
        let err = out.try_clone().map_err(failed)?;
        let child = command.stdin(Stdio::null()).stdout(out).stderr(err).spawn();
        let child = child.map_err(|error| Failure::new(format!("{name}: {error}")))?;
        println!(
            "{name} runs beside what follows; its log: {}",
            log.display()
        );
        Ok(Self {
            name,
            child,
            log,
            began: Instant::now(),
        })
    }
}

/// Returns a command that runs this program at the lowest priority.
fn lowered() -> Result<Command, Failure> {
    let program = std::env::current_exe()
        .map_err(|error| Failure::new(format!("this program's own path: {error}")))?;
    // The first choice is Linux's SCHED_IDLE, then `nice`. A thread that waits by sched_yield gives its turn to a
    // niced process (10 us a call instead of 1), and keeps it beside an idle one.
    let lower = [("chrt", &["--idle", "0"][..]), ("nice", &["-n", "19"][..])];
    let found = lower
        .iter()
        .find_map(|(name, words)| on_path(name).map(|path| (path, words)));
    Ok(match found {
        Some((path, words)) => {
            let mut command = Command::new(path);
            command.args(*words).arg(program);
            command
        }
        None => Command::new(program),
    })
}

/// Gives the process and its descendants the usual priority: on a busy machine they would hardly run. If that is not
/// possible, their priority does not change.
fn raise(pid: u32) {
    let mut family = vec![pid];
    let mut others = processes();
    while let Some(at) = others
        .iter()
        .position(|(_, parent)| family.contains(parent))
    {
        family.push(others.swap_remove(at).0);
    }
    for pid in family {
        if field(&stat(pid), POLICY) == Some(IDLE) {
            let mut chrt = Command::new("chrt");
            chrt.args(["--all-tasks", "--other", "--pid", "0"]);
            chrt.arg(pid.to_string()).stdin(Stdio::null());
            let _ = chrt.output();
        }
    }
}

/// Returns each process with its parent.
fn processes() -> Vec<(u32, u32)> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(|pid| Some((pid, field(&stat(pid), PARENT)?)))
        .collect()
}

/// Seconds of processor time of all children that ended: which stage leaves processors idle.
pub fn children_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    ticks(&text, CHILDREN) as f64 / 100.0
}

/// Seconds of processor time that the running process `pid` has used, its threads together.
pub fn process_seconds(pid: u32) -> f64 {
    ticks(&stat(pid), ITSELF) as f64 / 100.0
}

/// Waits for the end of a child. Returns its status, and the seconds of processor time of the child and its children.
pub fn wait_counted(child: &mut Child) -> std::io::Result<(ExitStatus, f64)> {
    let pid = child.id();
    while !has_ended(pid) {
        std::thread::sleep(PAUSE);
    }
    let used = used_seconds(pid);
    Ok((child.wait()?, used))
}

/// Seconds of processor time of a child that has ended and was not waited for, its own children included.
fn used_seconds(pid: u32) -> f64 {
    let stat = stat(pid);
    (ticks(&stat, ITSELF) + ticks(&stat, CHILDREN)) as f64 / 100.0
}

/// Returns whether a child has ended and was not waited for.
fn has_ended(pid: u32) -> bool {
    let stat = stat(pid);
    fields(&stat).next().is_none_or(|state| state == "Z")
}

fn stat(pid: u32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default()
}

/// The field `ppid` of /proc/PID/stat.
const PARENT: usize = 4;
/// The field `utime`, which `stime` follows.
const ITSELF: usize = 14;
/// The field `cutime`, which `cstime` follows.
const CHILDREN: usize = 16;
/// The field `policy`, and its value SCHED_IDLE.
const POLICY: usize = 41;
const IDLE: u32 = 5;

/// Returns the fields from the third on. The name of the program, in brackets, may hold blanks.
fn fields(stat: &str) -> impl Iterator<Item = &str> {
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    fields.split_whitespace()
}

fn field(stat: &str, number: usize) -> Option<u32> {
    fields(stat).nth(number - 3)?.parse().ok()
}

/// Returns the sum of two fields of /proc/PID/stat, in ticks of 1/100 s (USER_HZ on every Linux of today).
fn ticks(stat: &str, first: usize) -> u64 {
    let fields = fields(stat).skip(first - 3).take(2);
    fields.filter_map(|field| field.parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::{
        CHILDREN, ITSELF, PARENT, ProcessQueue, QueuedProcess, children_seconds, field,
        process_seconds,
    };
    use super::{processes, ticks};
    use std::process::Command;

    fn shell(name: &str, script: &str) -> QueuedProcess {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        QueuedProcess {
            name: format!("test-of-background-{name}"),
            command,
        }
    }

    #[test]
    fn output_status_and_processor_time_of_a_process_are_kept() {
        let busy = "i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); done";
        let script = format!("echo out; echo err >&2; sh -c '{busy}'; exit 3");
        let queue = ProcessQueue::of([shell("kept", &script)].into());
        let done = queue.wait("test-of-background-kept").unwrap();
        assert!(!done.success);
        assert_eq!(done.text, "out\nerr\n");
        assert!(done.used > 0.0, "{}", done.used);
        // Other tests have children, too.
        assert!(queue.others_seconds() <= children_seconds() - done.used + 1e-9);
    }

    #[test]
    fn what_waits_in_the_queue_can_be_taken_away() {
        let names = ["first", "second", "third"];
        let wait = "while kill -0 $PPID && ! test -e";
        let file = std::env::temp_dir().join(format!("queue-{}", std::process::id()));
        let script = format!("{wait} {}; do sleep 0.02; done", file.display());
        let queue = ProcessQueue::of(names.map(|name| shell(name, &script)).into());
        // Two processes are started as soon as their threads run; the third is not started before one of them ends.
        assert!(queue.take("test-of-background-third"));
        assert!(!queue.take("test-of-background-third"));
        std::fs::write(&file, "").unwrap();
        for name in &names[..2] {
            let done = queue.wait(&format!("test-of-background-{name}")).unwrap();
            assert!(done.success);
        }
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn one_that_cannot_be_started_is_a_failure() {
        let mut missing = shell("missing", "");
        missing.command = Command::new("/no/such/program");
        let queue = ProcessQueue::of([missing].into());
        assert!(queue.wait("test-of-background-missing").is_err());
    }

    #[test]
    fn fields_are_counted_behind_the_name() {
        let stat = "7 (a b) c) S 4 5 6 7 8 9 10 11 12 13 140 15 160 17 18";
        assert_eq!(ticks(stat, ITSELF), 140 + 15);
        assert_eq!(ticks(stat, CHILDREN), 160 + 17);
        assert_eq!(field(stat, PARENT), Some(4));
        assert_eq!(ticks("", ITSELF), 0);
        assert!(process_seconds(std::process::id()) >= 0.0);
        let own = std::process::id();
        assert!(processes().iter().any(|(pid, _)| *pid == own));
    }
}
