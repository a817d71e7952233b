//! Calls of CUDA by a user's program while a gather waits for the drive: none of them may wait for the drive for good,
//! and none may be disturbed. docs/adr/0008 has the reasons.
// UNSAFETY: calls into the driver library, as a user's program makes them.
#![allow(unsafe_code)]

use crate::bench::Bench;
use crate::by_host::Scratch;
use crate::gather::{Drive, Job, dice, random_jobs, run_over, several_streams, text};
use crate::limits::limit;
use crate::report::{Outcome, Report};
use cudarc::driver::sys::{self, CUresult};
use nvme_gpu_kernel::rows::code;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// Every 40th read takes this long, so that a gather waits while the user's call runs.
const SLOW: &str = "delay:3ms@op=read,every=40";
const ROWS: usize = 400;

fn check(call: &str, result: CUresult) -> Outcome<()> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        other => Err(format!("{call}: {other:?}")),
    }
}

type Call = fn(&Drive) -> Outcome<()>;

/// Calls of the user meanwhile.
pub const CALLS: [(&str, Call); 7] = [
    ("synchronize", synchronize),
    ("free", free),
    ("free-host", free_host),
    ("module-load", load_module),
    ("many-launches", queue_copies),
    ("capture-elsewhere", capture_elsewhere),
    ("nothing", |_| Ok(())),
];

pub fn all(report: &mut Report, bench: &Bench) {
    for (name, call) in CALLS {
        report.case(&format!("gather/beside/{name}"), |options| {
            let rounds = (options.commands / 1000).clamp(3, 1000);
            beside(bench, call, rounds).into()
        });
    }
    report.case("gather/graph/replay", |options| {
        let drive = Drive::new(bench, 4096, "", limit());
        let rounds = (options.commands / 1000).clamp(3, 1000);
        drive.and_then(|drive| replay(&drive, rounds)).into()
    });
    report.case("gather/graph/outlives-its-store", |_| {
        let drive = Drive::new(bench, 4096, "", limit());
        drive.and_then(|drive| outlives(drive, 300)).into()
    });
    report.case("gather/graph/file-outlives-its-store", |_| {
        let run = || {
            let file = Scratch::new()?;
            outlives(Drive::open(bench, &file.device(), limit())?, 300)
        };
        run().into()
    });
    report.case("gather/graph/replay-by-host", |options| {
        let run = || {
            let file = Scratch::new()?;
            let drive = Drive::open(bench, &file.device(), limit())?;
            replay(&drive, (options.commands / 10_000).clamp(3, 100))
        };
        run().into()
    });
    report.case("gather/context", |_| context(bench).into());
    report.case("gather/full-gpu", |_| full(bench).into());
}

/// Runs gathers and, while each waits, a call of the user.
fn beside(bench: &Bench, call: Call, rounds: u64) -> Outcome<String> {
    let drive = Drive::new(bench, 4096, SLOW, limit())?;
    let mut throw = dice(rounds);
    let table = drive.table(0, 4096);
    let mut worst = Duration::ZERO;
    for round in 0..rounds {
        let ids = (0..ROWS).map(|_| throw(table.rows) as i64).collect();
        let job = Job::new(&drive, table, ids, true, 0)?;
        let begin = Instant::now();
        let pending = job.start(&drive, &drive.stream)?;
        let called = std::thread::scope(|scope| {
            let user = scope.spawn(|| current(&drive).and_then(|()| call(&drive)));
            user.join()
                .unwrap_or_else(|_| Err("the user's thread panicked".to_owned()))
        });
        let gathered = pending.wait(limit()).map_err(text);
        let took = begin.elapsed();
        worst = worst.max(took);
        called?;
        if gathered?.failures.rows != 0 || took > limit() {
            return Err(format!("round {round}: {:?} in {took:?}", pending.last()));
        }
        if job.check(&drive)?.iter().any(|code| *code != code::OK) {
            return Err(format!("round {round}: rows failed"));
        }
    }
    Ok(format!(
        "{rounds} rounds, {:.1} ms at worst",
        worst.as_secs_f64() * 1e3
    ))
}

/// Makes the GPU's primary context current, as a user's program does.
pub fn current(drive: &Drive) -> Outcome<()> {
    let mut context = null_mut();
    // SAFETY: the call retains the primary context once more; the program keeps it.
    check("cuDevicePrimaryCtxRetain", unsafe {
        sys::cuDevicePrimaryCtxRetain(&mut context, drive.gpu().index() as i32)
    })?;
    // SAFETY: a context that is retained.
    check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(context) })
}

fn synchronize(_: &Drive) -> Outcome<()> {
    // SAFETY: the call takes no pointers.
    check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
}

fn free(_: &Drive) -> Outcome<()> {
    let mut address = 0;
    // SAFETY: the call writes one address.
    check("cuMemAlloc", unsafe {
        sys::cuMemAlloc_v2(&mut address, 1 << 20)
    })?;
    // SAFETY: it was allocated above.
    check("cuMemFree", unsafe { sys::cuMemFree_v2(address) })
}

fn free_host(_: &Drive) -> Outcome<()> {
    let mut memory = null_mut();
    // SAFETY: the call writes one address.
    check("cuMemHostAlloc", unsafe {
        sys::cuMemHostAlloc(&mut memory, 1 << 20, 0)
    })?;
    // SAFETY: it was allocated above.
    check("cuMemFreeHost", unsafe { sys::cuMemFreeHost(memory) })
}

/// A module that was not loaded before, and the first launch of a kernel in it.
fn load_module(_: &Drive) -> Outcome<()> {
    let image =
        b".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry nothing() { ret; }\n\0";
    let mut module = null_mut();
    // SAFETY: terminated text; the call writes one handle.
    check("cuModuleLoadData", unsafe {
        sys::cuModuleLoadData(&mut module, image.as_ptr().cast())
    })?;
    let mut function = null_mut();
    // SAFETY: the module above; a terminated name; the call writes one handle.
    check("cuModuleGetFunction", unsafe {
        sys::cuModuleGetFunction(&mut function, module, c"nothing".as_ptr())
    })?;
    let stream = OwnStream::new()?;
    stream.launch(function)?;
    stream.synchronize()?;
    // SAFETY: the module was loaded above, and its kernel has ended.
    check("cuModuleUnload", unsafe { sys::cuModuleUnload(module) })
}

/// 2,000 operations in another stream.
fn queue_copies(_: &Drive) -> Outcome<()> {
    let stream = OwnStream::new()?;
    let mut address = 0;
    // SAFETY: the call writes one address.
    check("cuMemAlloc", unsafe {
        sys::cuMemAlloc_v2(&mut address, 4096)
    })?;
    for value in 0..2000u32 {
        // SAFETY: the range is inside the allocation.
        check("cuMemsetD8Async", unsafe {
            sys::cuMemsetD8Async(address, value as u8, 4096, stream.0)
        })?;
    }
    stream.synchronize()?;
    // SAFETY: it was allocated above.
    check("cuMemFree", unsafe { sys::cuMemFree_v2(address) })
}

/// A capture in global mode, which any thread's careless call ends.
fn capture_elsewhere(_: &Drive) -> Outcome<()> {
    let stream = OwnStream::new()?;
    stream.begin_capture()?;
    std::thread::sleep(Duration::from_millis(5));
    stream.end_capture().map(|graph| {
        // SAFETY: the graph is our own.
        let _ = unsafe { sys::cuGraphDestroy(graph) };
    })
}

/// A stream that the user made.
pub struct OwnStream(sys::CUstream);

impl OwnStream {
    pub fn new() -> Outcome<Self> {
        let mut stream = null_mut();
        // SAFETY: the call writes one handle.
        check("cuStreamCreate", unsafe {
            sys::cuStreamCreate(&mut stream, 1)
        })?;
        Ok(Self(stream))
    }

    /// Returns the `CUstream`.
    pub fn handle(&self) -> u64 {
        self.0.expose_provenance() as u64
    }

    fn launch(&self, function: sys::CUfunction) -> Outcome<()> {
        // SAFETY: a kernel without parameters.
        check("cuLaunchKernel", unsafe {
            sys::cuLaunchKernel(
                function,
                1,
                1,
                1,
                1,
                1,
                1,
                0,
                self.0,
                null_mut(),
                null_mut(),
            )
        })
    }

    pub fn synchronize(&self) -> Outcome<()> {
        // SAFETY: the stream is our own.
        check("cuStreamSynchronize", unsafe {
            sys::cuStreamSynchronize(self.0)
        })
    }

    /// Begins a capture in global mode.
    pub fn begin_capture(&self) -> Outcome<()> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        // SAFETY: the stream is our own.
        check("cuStreamBeginCapture", unsafe {
            sys::cuStreamBeginCapture_v2(self.0, mode)
        })
    }

    pub fn end_capture(&self) -> Outcome<sys::CUgraph> {
        let mut graph = null_mut();
        // SAFETY: the stream is our own; the call writes one handle.
        check("cuStreamEndCapture", unsafe {
            sys::cuStreamEndCapture(self.0, &mut graph)
        })?;
        Ok(graph)
    }
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        // SAFETY: it was created in `new`.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.0) };
    }
}

/// A graph that is ready to be launched.
pub struct Graph(sys::CUgraphExec);

impl Graph {
    /// Captures the launches of `start` in the stream, in global mode.
    pub fn of<T>(stream: &OwnStream, start: impl FnOnce(u64) -> Outcome<T>) -> Outcome<(Self, T)> {
        stream.begin_capture()?;
        let pending = start(stream.handle());
        let graph = stream.end_capture()?;
        let pending = pending?;
        let mut exec = null_mut();
        // SAFETY: the graph above; the call writes one handle.
        check("cuGraphInstantiate", unsafe {
            sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0)
        })?;
        Ok((Self(exec), pending))
    }

    pub fn launch(&self, stream: &OwnStream) -> Outcome<()> {
        // SAFETY: both are alive.
        check("cuGraphLaunch", unsafe {
            sys::cuGraphLaunch(self.0, stream.0)
        })
    }
}

/// A gather in a graph, replayed with other ids.
pub fn replay(drive: &Drive, rounds: u64) -> Outcome<String> {
    current(drive)?;
    let table = drive.table(0, 4096);
    let mut throw = dice(3);
    let mut ids = || -> Vec<i64> { (0..1024).map(|_| throw(table.rows) as i64).collect() };
    let mut job = Job::new(drive, table, ids(), true, 0)?;
    let stream = OwnStream::new()?;
    let (graph, pending) = Graph::of(&stream, |stream| job.start_on(drive, stream))?;
    if !pending.is_captured() || pending.is_done() {
        return Err("the gather ran while it was captured".to_owned());
    }
    let mut took = Vec::new();
    for round in 0..rounds {
        job.replace_ids(ids())?;
        let begin = Instant::now();
        graph.launch(&stream)?;
        while u64::from(pending.ended()) <= round {
            if begin.elapsed() > limit() {
                return Err(format!("replay {round} does not end"));
            }
        }
        took.push(begin.elapsed().as_secs_f64() * 1e6);
        if job.check(drive)?.iter().any(|code| *code != code::OK) {
            return Err(format!("replay {round}: rows failed"));
        }
    }
    took.sort_by(f64::total_cmp);
    let at = |share: usize| took[(took.len() * share / 100).min(took.len() - 1)];
    Ok(format!(
        "{rounds} replays of 1,024 rows of 4 KiB: p50 {:.0} us, p99 {:.0} us",
        at(50),
        at(99)
    ))
}

/// A graph of `count` rows is launched after its store was closed: each row is zero, and reports it.
pub fn outlives(drive: Drive, count: i64) -> Outcome<String> {
    current(&drive)?;
    let table = drive.table(0, 4096);
    let job = Job::new(&drive, table, (0..count).collect(), true, 0)?;
    let stream = OwnStream::new()?;
    let (graph, pending) = Graph::of(&stream, |stream| job.start_on(&drive, stream))?;
    graph.launch(&stream)?;
    stream.synchronize()?;
    if job.check(&drive)?.iter().any(|code| *code != code::OK) {
        return Err("rows failed while the store was there".to_owned());
    }
    let image = drive.close();
    graph.launch(&stream)?;
    stream.synchronize()?;
    let codes = job.check_against(&image)?;
    match codes.iter().all(|code| *code == code::GONE) && pending.ended() == 2 {
        true => Ok(format!("{count} rows are zero and GONE")),
        false => Err(format!("{codes:?}")),
    }
}

/// A thread without a context has none after a gather, either.
fn context(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 4096, "", limit())?;
    let table = drive.table(0, 4096);
    let job = Job::new(&drive, table, vec![1, 2, 3], true, 0)?;
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| -> Outcome<()> {
            let pending = job.start(&drive, &drive.stream)?;
            pending.wait(limit()).map_err(text)?;
            let mut context = null_mut();
            // SAFETY: the call writes one handle.
            check("cuCtxGetCurrent", unsafe {
                sys::cuCtxGetCurrent(&mut context)
            })?;
            match context.is_null() {
                true => Ok(()),
                false => Err("the thread has a context now".to_owned()),
            }
        });
        thread.join().unwrap_or_else(|_| Err("panicked".to_owned()))
    })?;
    Ok("the thread's context is as it was".to_owned())
}

/// Several launches at once have more blocks than the GPU holds.
fn full(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 512, "", limit())?;
    let table = drive.table(0, 512);
    let mut throw = dice(9);
    let streams = several_streams(bench, 16)?;
    let jobs = random_jobs(&drive, table, (200, 3000), &mut throw)?;
    for codes in run_over(&drive, &jobs, &streams)? {
        if codes.iter().any(|code| *code != code::OK) {
            return Err("rows failed".to_owned());
        }
    }
    Ok("200 gathers of 3,000 rows over 16 streams and 4 stations".to_owned())
}
