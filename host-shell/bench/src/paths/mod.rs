//! Reads of one file to memory by several paths, alternating over the same bytes: our driver, cuFile, `pread` into
//! pageable memory and a copy, `pread` into pinned memory and an asynchronous copy.
//!
//! - `job`, `plan`: the bytes that are read.
//! - `by_pread`: the paths that use the CPU.
//! - `place`, `on_gpu`, `on_host`: the destination, and the paths to it.

mod by_pread;
mod job;
#[cfg(feature = "cuda")]
mod on_gpu;
mod on_host;
mod place;
mod plan;

pub use job::PathsJob;

use crate::measure::median;
use nvme_driver::error::{Error, Result};
use nvme_files::files::open_regular;
use nvme_store::Store;
use place::{BytePath, PathDestination};
use plan::ReadPlan;
use serde_json::{Value, json};
use std::fs::File;
use std::io::Read;

/// Bytes that the device's content is compared and written in.
const CHUNK: usize = 4 << 20;
/// The unit of the file that is used.
const BLOCK: u64 = 4096;

/// Runs every case by every way and gives one object; `step` is called between runs, with the name of the case.
///
/// `store` holds the same bytes as the file, from its start on, and reaches the job's GPU; if it could not be opened,
/// the result of our driver's path has the reason.
///
/// # Errors
/// The error that keeps a case from running; wrong bytes; the errors of `step`.
pub fn paths(
    store: Result<Store>,
    job: &PathsJob,
    step: &mut dyn FnMut(&str) -> Result<()>,
) -> Result<Value> {
    let (file, _) = open_regular(&job.file)?;
    let content = content_of(&file, job)?;
    let plans = ReadPlan::all(job, content.len() as u64);
    let (store, refusal) = match store {
        Ok(store) => (Some(store), None),
        Err(error) => (None, Some(error)),
    };
    if let Some(store) = &store {
        same_content(store, &content, job.lay_out)?;
    }
    let longest = plans.iter().map(ReadPlan::len).max().unwrap_or(0);
    let of_file = (&file, job.file.as_path());
    let mut place: Box<dyn PathDestination + '_> = match job.gpu {
        #[cfg(feature = "cuda")]
        Some(gpu) => Box::new(on_gpu::GpuDestination::new(
            gpu,
            store.as_ref(),
            of_file,
            job,
            longest,
        )?),
        _ => Box::new(on_host::HostDestination {
            file: of_file,
            store: store.as_ref(),
            threads: job.threads,
            out: vec![0; longest],
        }),
    };
    let limits = place.limits(job.runs)?;
    let mut ways = PathResults::new(place.ways(), refusal);
    let mut have = vec![0; longest];
    let mut cases = Vec::new();
    for plan in plans.iter().filter(|plan| plan.len() > 0) {
        cases.extend(one_plan(
            &mut *place,
            plan,
            job,
            (&content, &mut have),
            (limits, &mut ways),
            step,
        )?);
    }
    let path = store.as_ref().map(Store::path);
    Ok(json!({
        "file": job.file.display().to_string(), "bytes": content.len(),
        "to": if job.gpu.is_some() { "GPU memory" } else { "host memory" },
        "device": path.as_ref().map(|path| &path.device), "path": path.as_ref().map(|path| &path.path),
        "why": path.as_ref().map(|path| &path.why),
        "cores": std::thread::available_parallelism().map_or(1, usize::from),
        "threads": job.threads, "runs": job.runs,
        "link_gb_per_s": limits.0.map(|rate| rate / 1e9), "memory_gb_per_s": limits.1 / 1e9,
        "ways": ways.0.iter().map(PathResult::to_json).collect::<Vec<_>>(), "cases": cases,
    }))
}

/// Returns the whole blocks of the file.
fn content_of(file: &File, job: &PathsJob) -> Result<Vec<u8>> {
    let mut content = Vec::new();
    let read = file.take(job.bytes).read_to_end(&mut content);
    read.map_err(Error::file("read", &job.file))?;
    let bytes = content.len() as u64 / BLOCK * BLOCK;
    let is_whole = |size: &u64| *size > 0 && size.is_multiple_of(BLOCK);
    if bytes == 0 || !job.sizes.iter().all(is_whole) {
        let (found, sizes) = (content.len(), &job.sizes);
        return Err(Error::usage(
            format!(
                "the file has {found} bytes, and it and each read ({}) must be multiples of {BLOCK} bytes above 0",
                sizes
                    .iter()
                    .map(u64::to_string)
                    .collect::<Vec<_>>()
                    .join(", ")
            ),
            "use a file of 4096 bytes at least, and multiples of 4096",
        ));
    }
    content.truncate(bytes as usize);
    Ok(content)
}

/// # Errors
/// [`Error::Mismatch`] where the device has other bytes and they may not be written; the errors of the store.
fn same_content(store: &Store, content: &[u8], lay_out: bool) -> Result<()> {
    if store.len() < content.len() as u64 {
        return Err(Error::usage(
            format!("the device has {} bytes, fewer than the file", store.len()),
            "use a larger device or a smaller file",
        ));
    }
    let mut have = vec![0; CHUNK];
    for (index, want) in content.chunks(CHUNK).enumerate() {
        let (offset, have) = ((index * CHUNK) as u64, &mut have[..want.len()]);
        store.read_at(offset, have)?;
        if have == want {
            continue;
        }
        if !lay_out {
            return Err(Error::Mismatch {
                what: "the device has other bytes than the file".to_owned(),
            });
        }
        store.write_at(offset, want)?;
    }
    Ok(())
}

/// A path, and its result.
struct PathResult {
    way: BytePath,
    name: &'static str,
    how: Option<String>,
    /// Reason why the path does not run, or no longer runs.
    refusal: Option<Error>,
}

impl PathResult {
    fn to_json(&self) -> Value {
        json!({
            "way": self.name, "how": self.how,
            "why_not": self.refusal.as_ref().map(ToString::to_string),
            "remedy": self.refusal.as_ref().map(Error::remedy),
        })
    }
}

struct PathResults(Vec<PathResult>);

impl PathResults {
    /// Creates the entry; `refusal` is the reason why there is no store.
    fn new(all: Vec<(BytePath, &'static str, Result<String>)>, mut refusal: Option<Error>) -> Self {
        let one = |(way, name, how): (BytePath, &'static str, Result<String>)| {
            let (how, error) = match how {
                Ok(how) => (Some(how), None),
                Err(error) => (None, Some(error)),
            };
            let refusal = match way {
                BytePath::Direct => refusal.take().or(error),
                _ => error,
            };
            PathResult {
                way,
                name,
                how,
                refusal,
            }
        };
        Self(all.into_iter().map(one).collect())
    }
}

#[derive(Clone, Default)]
struct PathMeasurements {
    whole: Vec<f64>,
    read: Vec<f64>,
    copy: Vec<f64>,
}

/// Measures one plan; returns one line for each path that runs.
fn one_plan(
    place: &mut dyn PathDestination,
    plan: &ReadPlan,
    job: &PathsJob,
    (content, have): (&[u8], &mut [u8]),
    (limits, ways): ((Option<f64>, f64), &mut PathResults),
    step: &mut dyn FnMut(&str) -> Result<()>,
) -> Result<Vec<Value>> {
    let name = format!(
        "{} {}",
        plan.pattern,
        nvme_driver::units::bytes(plan.bytes as u64)
    );
    let have = &mut have[..plan.len()];
    place.prepare(plan)?;
    let mut measured = vec![PathMeasurements::default(); ways.0.len()];
    for run in 0..=job.runs {
        for (one, measured) in ways.0.iter_mut().zip(&mut measured) {
            if one.refusal.is_some() {
                continue;
            }
            step(&name)?;
            place.spoil()?;
            let seconds = match place.run(one.way, plan) {
                Ok(seconds) => seconds,
                // A library that refuses its own path: the other paths are still measured.
                Err(error @ Error::Environment { .. }) if one.way == BytePath::CuFile => {
                    one.refusal = Some(error);
                    continue;
                }
                Err(error) => return Err(error),
            };
            place.take(have)?;
            match plan.wrong_bytes(have, content) {
                0 => {}
                wrong => {
                    return Err(Error::Mismatch {
                        what: format!("{wrong} bytes are wrong by {} ({name})", one.name),
                    });
                }
            }
            // The first run finds memory that was never touched.
            if run > 0 {
                measured.whole.push(seconds);
                if let Some((read, copy)) = place.steps(one.way, plan)? {
                    measured.read.push(read);
                    measured.copy.push(copy);
                }
            }
        }
    }
    let of = |(one, measured): (&PathResult, &PathMeasurements)| {
        (one.refusal.is_none()).then(|| line(one, plan, limits, measured))
    };
    Ok(ways.0.iter().zip(&measured).filter_map(of).collect())
}

fn line(
    one: &PathResult,
    plan: &ReadPlan,
    (link, memory): (Option<f64>, f64),
    measured: &PathMeasurements,
) -> Value {
    let seconds = median(&measured.whole);
    let rate = plan.len() as f64 / seconds;
    let groups = plan.groups().count();
    let steps =
        (!measured.read.is_empty()).then(|| (median(&measured.read), median(&measured.copy)));
    json!({
        "pattern": plan.pattern, "read_bytes": plan.bytes, "way": one.name,
        "reads": plan.offsets.len(), "at_once": plan.at_once,
        "gb_per_s": rate / 1e9, "iops": plan.offsets.len() as f64 / seconds,
        "us_per_batch": plan.is_in_batches().then(|| seconds * 1e6 / groups as f64),
        "of_link": link.map(|link| rate / link), "of_memory": rate / memory,
        "read_s": steps.map(|steps| steps.0), "copy_s": steps.map(|steps| steps.1),
        "overlap": steps.map(|steps| overlap(seconds, steps)),
        "seconds": measured.whole, "checked": true,
    })
}

/// Returns the overlapped fraction of the shorter of two steps: 0 if they ran in sequence.
fn overlap(whole: f64, (read, copy): (f64, f64)) -> f64 {
    let shorter = read.min(copy);
    match shorter > 0.0 {
        true => ((read + copy - whole) / shorter).clamp(0.0, 1.0),
        false => 0.0,
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use nvme_store::StoreOptions;
    use nvme_units::SplitMix;
    use std::path::PathBuf;

    struct Removed(PathBuf);

    impl Drop for Removed {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    fn file(name: &str, bytes: usize) -> Removed {
        let mut content = vec![0; bytes];
        SplitMix::new(3).fill(&mut content);
        let path = std::env::temp_dir().join(format!("nvme-paths-{}-{name}", std::process::id()));
        std::fs::write(&path, content).unwrap();
        Removed(path)
    }

    fn job(file: &Removed) -> PathsJob {
        PathsJob {
            sizes: vec![4096, 65_536, 64 << 20],
            threads: 3,
            runs: 2,
            ..PathsJob::new(file.0.clone())
        }
    }

    fn store(device: &str) -> Result<Store> {
        Store::open(device, &StoreOptions::default())
    }

    #[test]
    fn without_a_gpu_two_ways_lead_to_host_memory_and_two_say_why_not() {
        let file = file("host", 1 << 20);
        let device = format!("sim:{}?queues=8", file.0.display());
        let mut steps = 0;
        let mut count = |_: &str| {
            steps += 1;
            Ok(())
        };
        let report = paths(store(&device), &job(&file), &mut count).unwrap();
        let ways = report["ways"].as_array().unwrap();
        let runs = |way: &&Value| way["why_not"].is_null();
        let names: Vec<_> = ways.iter().filter(runs).map(|way| &way["way"]).collect();
        assert_eq!(names, ["direct", "cpu-memcpy"]);
        assert!(ways[1]["why_not"].as_str().unwrap().contains("no GPU"));
        // Two sizes fit, and two patterns of small reads; each is run by two paths.
        let cases = report["cases"].as_array().unwrap();
        assert_eq!((cases.len(), steps), (8, 8 * 3));
        for case in cases {
            assert!(case["gb_per_s"].as_f64().unwrap() > 0.0 && case["checked"] == true);
            assert_eq!(case["seconds"].as_array().unwrap().len(), 2);
            assert_eq!(case["of_link"], Value::Null);
            let overlap = case["overlap"].as_f64();
            assert_eq!(overlap.is_some(), case["way"] == "cpu-memcpy");
        }
        assert_eq!(
            cases[7]["us_per_batch"].as_f64().map(|us| us > 0.0),
            Some(true)
        );
        assert_eq!(cases[7]["at_once"], 32);
    }

    #[test]
    fn other_bytes_on_the_device_are_refused_or_overwritten() {
        let file = file("other", 1 << 20);
        let other = || store("sim:mem?size=2MiB");
        let nothing = &mut |_: &str| Ok(());
        let error = paths(other(), &job(&file), nothing).unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
        let laid_out = PathsJob {
            lay_out: true,
            ..job(&file)
        };
        assert!(paths(other(), &laid_out, nothing).is_ok());
        let small = store("sim:mem?size=512KiB");
        assert!(paths(small, &laid_out, nothing).is_err());
        // If a device cannot be opened, its path reports that.
        let report = paths(store("sim:nowhere/at/all"), &job(&file), nothing).unwrap();
        assert!(
            report["ways"][0]["why_not"]
                .as_str()
                .unwrap()
                .contains("nowhere")
        );
        assert_eq!(report["cases"].as_array().unwrap().len(), 4);
    }

    #[test]
    fn steps_beside_each_other_overlap() {
        assert_eq!(overlap(3.0, (1.0, 2.0)), 0.0);
        assert_eq!(overlap(2.0, (1.0, 2.0)), 1.0);
        assert_eq!(overlap(2.5, (1.0, 2.0)), 0.5);
        assert_eq!(overlap(1.0, (0.0, 1.0)), 0.0);
    }

    #[test]
    fn an_interrupted_run_ends() {
        let file = file("stop", 64 << 10);
        let stopped = paths(
            store("sim:mem?size=1MiB"),
            &PathsJob {
                lay_out: true,
                ..job(&file)
            },
            &mut |_| Err(Error::Interrupted),
        );
        assert!(matches!(stopped, Err(Error::Interrupted)));
    }
}
