//! Calls of the library while a stream of its user is being captured in global mode, in which the driver ends a capture
//! for any thread's allocation, query or wait: each call works, and the capture is complete.
// UNSAFETY: copies between addresses of memory.
#![allow(unsafe_code)]

use crate::bench::Bench;
use crate::by_host::Scratch;
use crate::gather::{Drive, Job, dice, text};
use crate::hazards::{OwnStream, current};
use crate::limits::{finish, limit};
use crate::report::{Outcome, Report};
use nvme_gpu_kernel::rows::code;
use nvme_host::DmaPages;
use nvme_host::cuda::{CudaGraph, DeviceMemory, Module, RegisteredMemory, Stream, StreamEvent};
use std::sync::Arc;

type Call = fn(&Bench, &Drive) -> Outcome<()>;

const CALLS: [(&str, Call); 9] = [
    ("memory", memory),
    ("registration", registration),
    ("stream", stream),
    ("module", module),
    ("graph", graph),
    ("gather", |_, drive| gather(drive)),
    ("scatter", scatter),
    ("store", |bench, _| {
        gather(&Drive::new(bench, 4096, "", limit())?)
    }),
    ("file", |bench, _| {
        let file = Scratch::new()?;
        gather(&Drive::open(bench, &file.device(), limit())?)
    }),
];

pub fn all(report: &mut Report, bench: &Bench) {
    for (name, call) in CALLS {
        report.test(&format!("graphs/beside/{name}"), |_| beside(bench, call));
    }
}

/// Makes `call` while this thread captures, in this thread and in another one.
fn beside(bench: &Bench, call: Call) -> Outcome<String> {
    let drive = Drive::new(bench, 4096, "", limit())?;
    current(&drive)?;
    for is_own in [true, false] {
        let captured = OwnStream::new()?;
        captured.begin_capture()?;
        let called = match is_own {
            true => call(bench, &drive),
            false => std::thread::scope(|scope| {
                let other = scope.spawn(|| current(&drive).and_then(|()| call(bench, &drive)));
                let ended = other.join();
                ended.unwrap_or_else(|_| Err("the other thread panicked".to_owned()))
            }),
        };
        let ended = captured.end_capture();
        let by = if is_own {
            "its thread"
        } else {
            "another thread"
        };
        called.map_err(|why| format!("by {by}: {why}"))?;
        ended.map_err(|why| format!("a call by {by} ended the capture: {why}"))?;
    }
    Ok("by the capturing thread and by another one".to_owned())
}

fn memory(bench: &Bench, _: &Drive) -> Outcome<()> {
    let run = || -> nvme_host::Result<Vec<u8>> {
        let memory = DeviceMemory::new(&bench.gpu, 4096)?;
        memory.zero()?;
        memory.upload(8, &[7; 8])?;
        let mut bytes = vec![0; 16];
        memory.download(0, &mut bytes)?;
        Ok(bytes)
    };
    match run().map_err(text)? == [[0; 8], [7; 8]].concat() {
        true => Ok(()),
        false => Err("bytes are wrong".to_owned()),
    }
}

fn registration(bench: &Bench, _: &Drive) -> Outcome<()> {
    let run = || -> nvme_host::Result<()> {
        let pages = Arc::new(DmaPages::new(8192)?);
        drop(RegisteredMemory::pages(&bench.gpu, &pages)?);
        Ok(())
    };
    run().map_err(text)
}

fn stream(bench: &Bench, _: &Drive) -> Outcome<()> {
    let run = || -> nvme_host::Result<()> {
        let (stream, memory) = (
            Stream::new(&bench.gpu)?,
            DeviceMemory::new(&bench.gpu, 4096)?,
        );
        let begin = StreamEvent::record(&stream)?;
        let at = memory.address();
        // SAFETY: the two halves belong to one memory, which outlives the wait.
        unsafe { stream.copy_within(at, at + 2048, 2048)? };
        let end = StreamEvent::record(&stream)?;
        finish(&stream);
        stream.is_done()?;
        stream.finish()?;
        end.seconds_since(&begin)?;
        Ok(())
    };
    run().map_err(text)
}

fn module(bench: &Bench, _: &Drive) -> Outcome<()> {
    let module = Module::of_image(&bench.gpu, &nvme_gpu_kernel::KERNELS);
    module.map(drop).map_err(text)
}

fn graph(bench: &Bench, _: &Drive) -> Outcome<()> {
    let run = || -> nvme_host::Result<()> {
        let (stream, memory) = (
            Stream::new(&bench.gpu)?,
            DeviceMemory::new(&bench.gpu, 4096)?,
        );
        let at = memory.address();
        // SAFETY: as above.
        let copy = |_| unsafe { stream.copy_within(at, at + 2048, 2048) };
        let (graph, ()) = CudaGraph::capture(&stream, copy)?;
        graph.launch(&stream)?;
        stream.finish()
    };
    run().map_err(text)
}

fn gather(drive: &Drive) -> Outcome<()> {
    let table = drive.table(0, 4096);
    let mut throw = dice(12);
    let ids = (0..300).map(|_| throw(table.rows) as i64).collect();
    let codes = drive.run(&Job::new(drive, table, ids, true, 0)?)?;
    match codes.iter().all(|code| *code == code::OK) {
        true => Ok(()),
        false => Err(format!("rows failed: {codes:?}")),
    }
}

/// Writes unconverted rows by a scatter, and checks that all of them were written.
fn scatter(_: &Bench, drive: &Drive) -> Outcome<()> {
    let job = Job::new(drive, drive.table(0, 4096), (0..50).collect(), true, 0)?;
    drive.run(&job)?;
    let ended = job.scatter(drive)?.wait(limit()).map_err(text)?;
    match ended.failures.rows {
        0 => Ok(()),
        _ => Err(format!("{ended:?}")),
    }
}
