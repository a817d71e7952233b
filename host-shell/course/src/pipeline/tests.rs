//! Tests of the pipelines by the CPU, over the simulator.

use super::trace::SpanWork;
use super::{MatrixSource, PipelineJob, PipelineName, PipelineReport, PipelineShape, run};
use nvme_formats::StoredFormat;
use nvme_host::{Error, Result, Store, StoreOptions};
use std::sync::Arc;
use std::time::Duration;

fn shape() -> PipelineShape {
    PipelineShape {
        stored: StoredFormat::Q8_0,
        rows: 48,
        columns: 96,
        vectors: 3,
        parts: 2,
        buffers: 2,
        joined: false,
    }
}

fn job(name: PipelineName) -> PipelineJob {
    PipelineJob {
        name,
        shape: PipelineShape {
            joined: name == PipelineName::IterativeComputation,
            ..shape()
        },
        batches: 7,
        runs: 2,
        runtime: Duration::from_millis(150),
        patience: Duration::from_secs(60),
        limit: Duration::from_secs(120),
        readers: 2,
        seed: 5,
        keep: false,
        file: None,
    }
}

/// Opens a store whose commands time out only if their answers are dropped: on a busy machine a
/// command takes long.
fn store(options: &str) -> Arc<Store> {
    let device = format!("sim:mem?size=4MiB{options}");
    let timeout = match options.contains("drop") {
        true => Duration::from_secs(2),
        false => Duration::from_secs(120),
    };
    let options = StoreOptions {
        timeout,
        ..StoreOptions::default()
    };
    Arc::new(Store::open(&device, &options).unwrap())
}

fn ran(job: &PipelineJob, device: &str) -> Result<PipelineReport> {
    run(&store(device), job, &mut |_, _, _| Ok(()))
}

#[test]
fn every_pipeline_runs_on_the_cpu_and_says_what_took_place() {
    for name in PipelineName::ALL {
        let report = ran(&job(name), "").unwrap();
        let batches = match name {
            PipelineName::DirectNvmeToMatMul => 1,
            PipelineName::IterativeComputation => 14,
            PipelineName::ContinuousProcessing => report.ways[0].batches,
            _ => 7,
        };
        for way in &report.ways {
            assert_eq!(way.batches, batches, "{name:?}");
            let runs = if name == PipelineName::ContinuousProcessing {
                1
            } else {
                2
            };
            assert_eq!(way.seconds.len(), runs);
            assert_eq!(way.operations, 2.0 * 48.0 * 96.0 * 3.0 * batches as f64);
            assert!(way.overlap.compute_us > 0.0 && way.overlap.share() <= 1.0);
        }
        let spans = |work| {
            report
                .trace
                .spans
                .iter()
                .filter(|span| span.work == work)
                .count() as u64
        };
        assert_eq!(
            (spans(SpanWork::Read), spans(SpanWork::Compute)),
            (batches, batches),
            "{name:?}"
        );
        assert_eq!(
            report.continuous.is_some(),
            name == PipelineName::ContinuousProcessing
        );
        if let Some(met) = &report.continuous {
            assert_eq!((met.latencies_ns.len(), met.failed), (batches, 0));
        }
    }
}

#[test]
fn sources_are_compared_on_the_same_batches() {
    let path = std::env::temp_dir().join(format!("nvme-pipeline-{}", std::process::id()));
    let mut job = job(PipelineName::DataSourceComparison);
    job.file = Some(path.clone());
    let report = ran(&job, "").unwrap();
    let sources: Vec<MatrixSource> = report.ways.iter().map(|way| way.source).collect();
    assert_eq!(
        sources,
        [
            MatrixSource::Threads,
            MatrixSource::File,
            MatrixSource::Resident
        ]
    );
    let bytes: Vec<u64> = report.ways.iter().map(|way| way.bytes).collect();
    assert_eq!(bytes, [48 * 102 * 7, 48 * 102 * 7, 0]);
    assert!(!path.exists());
    std::fs::write(&path, "mine").unwrap();
    assert!(matches!(ran(&job, ""), Err(Error::File { .. })));
    assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_drive_that_holds_other_weights_is_noticed() {
    let store = store("");
    let written = job(PipelineName::StreamedBatchProcessing);
    let go = |job: &PipelineJob| run(&store, job, &mut |_, _, _| Ok(()));
    go(&written).unwrap();
    let mut kept = written.clone();
    kept.keep = true;
    go(&kept).unwrap();
    // This flips one bit of a weight of the second matrix.
    let at = kept.shape.part_stride() + 700;
    let mut byte = [0];
    store.read_at(at, &mut byte).unwrap();
    store.write_at(at, &[byte[0] ^ 0x40]).unwrap();
    for name in PipelineName::ALL {
        let other = PipelineJob {
            keep: true,
            ..job(name)
        };
        let error = go(&other).map(drop).unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }), "{name:?}: {error}");
    }
}

#[test]
fn a_read_that_fails_ends_all_but_the_continuous_one() {
    for name in PipelineName::ALL {
        let mut job = job(name);
        job.keep = false;
        // The fault counts reads only: the first reads are the pipeline's.
        let ended = ran(&job, "&fault=status:0x281@op=read,nth=2");
        match (name, ended) {
            (PipelineName::ContinuousProcessing, Ok(report)) => {
                let met = report.continuous.unwrap();
                assert_eq!((met.failed, met.retries), (1, 1));
                assert!(met.last_failure.unwrap().contains("Unrecovered Read Error"));
            }
            (PipelineName::ContinuousProcessing, Err(error)) => panic!("{error}"),
            (_, ended) => {
                let error = ended.map(drop).unwrap_err();
                assert!(
                    error.to_string().contains("Unrecovered Read Error"),
                    "{name:?}: {error}"
                );
            }
        }
    }
}

#[test]
fn a_device_that_stays_away_ends_the_continuous_one_with_its_error() {
    let mut job = job(PipelineName::ContinuousProcessing);
    job.patience = Duration::from_millis(200);
    let error = ran(&job, "&fault=status:0x281@op=read,nth=3-100000")
        .map(drop)
        .unwrap_err();
    assert!(matches!(error, Error::Command { .. }), "{error}");
    // Commands without an answer are lost with a reset, and repeated after it.
    job.patience = Duration::from_secs(120);
    let report = ran(&job, "&fault=drop@op=read,nth=3").unwrap();
    let met = report.continuous.unwrap();
    assert_eq!(met.failed, 1);
    assert!(met.longest_outage < job.patience);
}

#[test]
fn an_end_that_is_asked_for_is_an_error_but_for_the_continuous_one() {
    let mut stops = |number: u64, _: u64, _: f64| match number {
        3.. => Err(Error::Interrupted),
        _ => Ok(()),
    };
    let ended = run(
        &store(""),
        &job(PipelineName::StreamedBatchProcessing),
        &mut stops,
    );
    assert!(matches!(ended, Err(Error::Interrupted)));
    let mut long = job(PipelineName::ContinuousProcessing);
    long.runtime = Duration::from_secs(600);
    let report = run(&store(""), &long, &mut stops).unwrap();
    assert!(report.continuous.unwrap().is_interrupted);
    assert_eq!(report.ways[0].batches, 3);
}

#[test]
fn shapes_that_cannot_be_are_refused() {
    let refused = |change: fn(&mut PipelineShape)| {
        let mut job = job(PipelineName::StreamedBatchProcessing);
        change(&mut job.shape);
        match ran(&job, "").map(drop) {
            Err(Error::Usage { cause, .. }) => cause,
            other => panic!("{other:?}"),
        }
    };
    assert!(refused(|shape| shape.columns = 95).contains("2 matrices of 48 x 95"));
    assert!(refused(|shape| shape.buffers = 0).contains("0 buffers"));
    let odd = refused(|shape| (shape.joined, shape.rows) = (true, 40));
    assert_eq!(
        odd,
        "joined matrices have 80 rows together and 96 columns, and these must be equal"
    );
    assert!(refused(|shape| shape.rows = 60_000).contains("on a drive of 4194304 bytes"));
}
