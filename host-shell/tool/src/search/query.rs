//! `search query`: searches of an index, with reads by the CPU and by a GPU, alternating. Both have to give the same
//! answers; recall is counted over the first queries by comparing all vectors.

use super::input::InputArgs;
use super::place::IndexPlace;
use crate::common::file::OutputFile;
use crate::common::images::CommandFiles;
use crate::common::{WriteArgs, check_stop, images, npy, number, output, progress};
use clap::Args;
use nvme_host::bench::median;
use nvme_host::{Error, Result, Store, StoreOptions, units};
#[cfg(feature = "cuda")]
use nvme_search::GpuSearch;
use nvme_search::{
    CpuOptions, MOST_BEAM, MOST_LIST, MOST_RESULTS, SearchAnswers, SearchParameters,
    VectorDistribution, VectorIndex, exact,
};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Bytes that are copied at a time.
const PIECE: usize = 8 << 20;
/// Queues of the CPU at most.
const MOST_QUEUES: u32 = 16;
/// Deadline of all queries of a run on a GPU.
#[cfg(feature = "cuda")]
const LIMIT: std::time::Duration = std::time::Duration::from_secs(300);

/// Search an index for the nearest vectors of queries, and say how many were found; with --gpu by a kernel that reads
/// the nodes and by threads of the CPU, in turns
#[derive(Args)]
pub struct QueryCommand {
    /// Device with the index: sim:PATH[?options], vfio:BDF, kmod:BDF, vfio-user:SOCKET, file:PATH
    #[arg(long, short = 'd')]
    device: String,
    #[command(flatten)]
    place: IndexPlace,
    /// Write the index in this file to the device first, at the offset
    #[arg(long, value_name = "FILE")]
    load: Option<PathBuf>,
    #[command(flatten)]
    write: WriteArgs,
    /// Results of a query
    #[arg(long, short = 'k', value_name = "N", default_value_t = 10, value_parser = number::<u32>(1..=MOST_RESULTS.into()))]
    k: u32,
    /// Nodes of a query that are read at a time
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = number::<u32>(1..=MOST_BEAM.into()))]
    beam: u32,
    /// Candidates that are kept: more find more, and read more
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = number::<u32>(1..=MOST_LIST.into()))]
    list: u32,
    #[command(flatten)]
    input: InputArgs,
    /// Queries: when missing 10,000, or all of the file's
    #[arg(long, value_name = "N", value_parser = number::<u32>(0..=10_000_000))]
    queries: Option<u32>,
    /// Write the ids as .npy: int64, (queries, k), -1 where there is none
    #[arg(long, value_name = "FILE")]
    out_ids: Option<PathBuf>,
    /// Write the distances as .npy: float32, (queries, k)
    #[arg(long, value_name = "FILE")]
    out_distances: Option<PathBuf>,
    /// Queries whose results are judged
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = number::<u32>(0..=10_000_000))]
    checked: u32,
    /// Runs of each way, after one that does not count
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = number::<usize>(1..=1000))]
    runs: usize,
    /// Threads of the CPU's searches
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = number::<usize>(1..=1024))]
    threads: usize,
    /// Queries that each of them has under way
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = number::<usize>(1..=1024))]
    together: usize,
    /// Search on GPU N (0 without a number), too
    #[cfg(feature = "cuda")]
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "0", value_parser = number::<u32>(0..=1023))]
    gpu: Option<u32>,
    /// Queue pairs of the GPU
    #[cfg(feature = "cuda")]
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = number::<u32>(1..=1024), requires = "gpu")]
    gpu_queues: u32,
    /// Blocks of the GPU that search at a time, 8 queries each
    #[cfg(feature = "cuda")]
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = number::<u32>(1..=1024), requires = "gpu")]
    stations: u32,
}

/// The runs of one way.
#[derive(Default)]
struct QueryRuns {
    seconds: Vec<f64>,
    answers: SearchAnswers,
}

impl QueryRuns {
    /// Adds a run. All runs have the same answers, unless reads failed: those of the last run that
    /// failed are kept.
    fn add(&mut self, answers: SearchAnswers, seconds: f64, counts: bool) {
        if self.answers.failed().is_none() {
            self.answers = answers;
        }
        if counts {
            self.seconds.push(seconds);
        }
    }
}

impl QueryCommand {
    pub fn run(self, files: &CommandFiles) -> Result<()> {
        let to = self.outputs(files)?;
        let store = Arc::new(self.store(files)?);
        let index = VectorIndex::open(&store, self.place.offset)?;
        let source = index.header().source;
        let queries = match self.input.open(Some(source.elements))? {
            Some(file) => file.numbers(self.queries.unwrap_or(file.count()))?,
            None => source.queries(self.queries.unwrap_or(10_000) as usize)?,
        };
        let count = queries.len() / source.elements as usize;
        let checked = (self.checked as usize).min(count);
        let nearest = self.nearest(&index, &queries[..checked * source.elements as usize])?;
        let (by_cpu, by_gpu) = self.ways(&index, &queries)?;
        let judged = |way: &QueryRuns| self.judged(way, count, &nearest);
        let header = index.header();
        let mut all = json!({
            "device": store.path().device,
            "vectors": source.kind.name(), "count": source.count, "dim": source.elements, "seed": source.seed,
            "metric": header.metric.name(), "degree": header.degree, "sub_dim": header.sub_elements,
            "bytes": header.bytes_of_index(), "memory_bytes": index.memory_bytes(),
            "k": self.k, "beam": self.beam, "list": self.list,
            "queries": count, "checked": checked, "runs": self.runs,
            "threads": self.threads, "together": self.together,
            "by_cpu": judged(&by_cpu), "by_gpu": null, "same_answers": null,
        });
        if let Some((way, about)) = &by_gpu {
            all["by_gpu"] = judged(way);
            if let (Value::Object(of), Value::Object(more)) = (&mut all["by_gpu"], about.clone()) {
                of.extend(more);
            }
            all["same_answers"] = json!(way.answers == by_cpu.answers);
        }
        match self.place.form.json {
            true => output::json(&all)?,
            false => show(&all)?,
        }
        by_cpu.answers.check()?;
        write(to, count, &by_cpu.answers)?;
        let Some((way, _)) = by_gpu else {
            return Ok(());
        };
        way.answers.check()?;
        check_same(&way.answers, &by_cpu.answers, self.k as usize)
    }

    /// Opens the files of ids and of distances.
    fn outputs(&self, files: &CommandFiles) -> Result<[Option<OutputFile>; 2]> {
        let open = |path: &Option<PathBuf>| {
            let path = path.as_deref();
            path.map(|path| npy::create(path, files)).transpose()
        };
        Ok([open(&self.out_ids)?, open(&self.out_distances)?])
    }

    fn store(&self, files: &CommandFiles) -> Result<Store> {
        let mut options = self.place.options((self.threads as u32).min(MOST_QUEUES));
        #[cfg(feature = "cuda")]
        if let Some(index) = self.gpu {
            options.gpu = Some(nvme_host::store::GpuOptions {
                index,
                rows: nvme_host::cuda::RowsOptions {
                    queues: self.gpu_queues,
                    stations: self.stations,
                    ..nvme_host::cuda::RowsOptions::default()
                },
            });
        }
        let Some(file) = &self.load else {
            images::must_exist(&self.device)?;
            options.read_only = true;
            return Store::open(&self.device, &options);
        };
        options.allow_write = self.write.allow_write;
        let device = nvme_host::open(&self.device)?;
        self.write.check(&*device, "search query --load")?;
        let store = Store::over(device, &options)?;
        load(file, &store, self.place.offset)?;
        files.keep_created();
        Ok(store)
    }

    /// Finds the nearest vectors of `queries`, by comparing all.
    fn nearest(&self, index: &VectorIndex, queries: &[f32]) -> Result<Vec<Vec<(u32, f32)>>> {
        if queries.is_empty() {
            return Ok(Vec::new());
        }
        let bar = progress::spinner("comparing all vectors");
        let (source, metric) = (index.header().source, index.header().metric);
        let vectors = match source.kind {
            VectorDistribution::Given => index.vectors()?,
            VectorDistribution::Clustered | VectorDistribution::Uniform => {
                let longest = index.header().longest;
                metric.of_vectors(&source.vectors()?, longest)?.into_owned()
            }
        };
        let queries = metric.of_queries(queries, source.elements as usize);
        let nearest = exact::nearest(&vectors, &queries, self.k as usize);
        bar.finish_and_clear();
        Ok(nearest)
    }

    /// Runs both ways in turns, and returns the report of the GPU.
    fn ways(
        &self,
        index: &VectorIndex,
        queries: &[f32],
    ) -> Result<(QueryRuns, Option<(QueryRuns, Value)>)> {
        let parameters = SearchParameters {
            list: self.list,
            beam: self.beam,
            results: self.k,
        };
        let options = CpuOptions {
            threads: self.threads,
            together: self.together,
        };
        #[cfg(feature = "cuda")]
        let mut by_gpu = match self.gpu {
            None => None,
            Some(_) => Some((GpuSearch::new(index)?, QueryRuns::default())),
        };
        let mut by_cpu = QueryRuns::default();
        for run in 0..=self.runs {
            check_stop()?;
            #[cfg(feature = "cuda")]
            if let Some((search, way)) = &mut by_gpu {
                let (answers, took) = search.run(queries, parameters, LIMIT)?;
                way.add(answers, took.as_secs_f64(), run > 0);
            }
            check_stop()?;
            let begin = Instant::now();
            let answers = index.search(queries, parameters, options)?;
            by_cpu.add(answers, begin.elapsed().as_secs_f64(), run > 0);
        }
        #[cfg(feature = "cuda")]
        if let Some((search, way)) = by_gpu {
            let (registers, local) = search.cost()?;
            let about = json!({
                "gpu": index.store().gpu().map(|gpu| gpu.describe()),
                "gpu_memory_bytes": search.memory_bytes(), "gpu_queues": self.gpu_queues, "stations": self.stations,
                "registers": registers, "local_bytes": local,
            });
            return Ok((by_cpu, Some((way, about))));
        }
        Ok((by_cpu, None))
    }

    fn judged(&self, way: &QueryRuns, queries: usize, nearest: &[Vec<(u32, f32)>]) -> Value {
        let (answers, k) = (&way.answers, self.k as usize);
        let rate = queries as f64 / median(&way.seconds);
        let reads = answers.reads_per_query();
        let recall = exact::recall(nearest, &answers.ids, &answers.distances, k);
        json!({
            "queries_per_s": rate, "reads_per_query": reads, "reads_per_s": rate * reads,
            "recall": (!nearest.is_empty()).then_some(recall),
            "failed": answers.failed().map_or(0, |(count, _, _)| count),
            "seconds": way.seconds,
        })
    }
}

/// Copies the index in `file` to `store`.
fn load(file: &Path, store: &Store, offset: u64) -> Result<()> {
    let options = StoreOptions {
        read_only: true,
        ..StoreOptions::default()
    };
    let from = Arc::new(Store::open(&format!("file:{}", file.display()), &options)?);
    // Only an index overwrites the content of the device.
    VectorIndex::open(&from, 0).map_err(|error| error.with_context(&file.display().to_string()))?;
    if offset
        .checked_add(from.len())
        .is_none_or(|end| end > store.len())
    {
        return Err(Error::usage(
            format!(
                "{} has {} bytes; at byte {offset} of {} bytes it does not fit",
                file.display(),
                from.len(),
                store.len()
            ),
            "use a larger device",
        ));
    }
    let bar = progress::bytes(from.len(), "load");
    let mut piece = vec![0; PIECE];
    let mut at = 0;
    while at < from.len() {
        check_stop()?;
        let length = (from.len() - at).min(PIECE as u64) as usize;
        from.read_at(at, &mut piece[..length])?;
        store.write_at(offset + at, &piece[..length])?;
        at += length as u64;
        bar.inc(length as u64);
    }
    store.flush()?;
    bar.finish_and_clear();
    Ok(())
}

/// Writes ids and distances, of queries that all have results.
fn write(to: [Option<OutputFile>; 2], queries: usize, answers: &SearchAnswers) -> Result<()> {
    let [ids, distances] = to;
    if let Some(to) = ids {
        npy::write(to, ("<i8", queries), &answers.ids, i64::to_le_bytes)?;
    }
    if let Some(to) = distances {
        npy::write(to, ("<f4", queries), &answers.distances, f32::to_le_bytes)?;
    }
    Ok(())
}

/// Checks that both ways have the same answers.
///
/// # Errors
/// [`Error::Mismatch`] with the number of queries whose answers differ, and the first of them.
fn check_same(by_gpu: &SearchAnswers, by_cpu: &SearchAnswers, k: usize) -> Result<()> {
    if by_gpu == by_cpu {
        return Ok(());
    }
    let of_query = |answers: &SearchAnswers, query: usize| {
        let results = query * k..(query + 1) * k;
        let distances = answers.distances.get(results.clone());
        let distances =
            distances.map(|all| all.iter().map(|one| one.to_bits()).collect::<Vec<_>>());
        let reads = answers.reads.get(query).copied();
        (
            answers.ids.get(results).map(<[i64]>::to_vec),
            distances,
            reads,
        )
    };
    let count = by_gpu.codes.len().max(by_cpu.codes.len());
    let differ = |query: &usize| of_query(by_gpu, *query) != of_query(by_cpu, *query);
    let mut different = (0..count).filter(differ);
    let first = different.next();
    Err(Error::Mismatch {
        what: format!(
            "the answers of the GPU and the CPU differ in {} of {count} queries, first in query {}",
            different.count() + usize::from(first.is_some()),
            first.unwrap_or_default()
        ),
    })
}

/// Prints the results for a person.
fn show(all: &Value) -> Result<()> {
    output::print(&to_text(all))
}

fn to_text(all: &Value) -> String {
    let number = |value: &Value| value.as_f64().unwrap_or(0.0);
    let mut text = format!(
        "{} {} vectors of {} on {}, {} in memory; {} results of {} candidates, {} nodes at a time\n",
        all["count"],
        all["vectors"].as_str().unwrap_or(""),
        all["dim"],
        all["device"].as_str().unwrap_or(""),
        units::bytes(all["memory_bytes"].as_u64().unwrap_or(0)),
        all["k"],
        all["list"],
        all["beam"],
    );
    for (way, who) in [("by_gpu", "GPU"), ("by_cpu", "CPU")] {
        let way = &all[way];
        if way.is_null() {
            continue;
        }
        let recall = match way["recall"].as_f64() {
            Some(recall) => format!("recall {recall:.4} over {} queries", all["checked"]),
            None => "recall not looked at".to_owned(),
        };
        text += &format!(
            "reads by the {who}: {:.0} queries/s, {:.1} reads a query, {:.2} M reads/s, {recall}, {} failed\n",
            number(&way["queries_per_s"]),
            number(&way["reads_per_query"]),
            number(&way["reads_per_s"]) / 1e6,
            way["failed"],
        );
    }
    text += match all["same_answers"].as_bool() {
        Some(true) => "the answers of both are the same\n",
        Some(false) => "THE ANSWERS OF BOTH DIFFER\n",
        None => "",
    };
    text
}

#[cfg(test)]
mod tests {
    use super::{SearchAnswers, check_same, to_text};
    use nvme_host::exit;
    use serde_json::json;

    #[test]
    fn answers_that_differ_are_an_error_and_shown() {
        let by_cpu = SearchAnswers {
            ids: vec![3, 1, 4, -1],
            distances: vec![0.5, 1.0, 2.0, f32::INFINITY],
            codes: vec![0; 2],
            reads: vec![7, 9],
        };
        check_same(&by_cpu.clone(), &by_cpu, 2).unwrap();
        let mut by_gpu = by_cpu.clone();
        by_gpu.distances[2] = 2.5;
        let error = check_same(&by_gpu, &by_cpu, 2).unwrap_err();
        assert_eq!(error.exit_code(), exit::MISMATCH);
        let text = error.to_string();
        assert!(text.contains("1 of 2 queries, first in query 1"), "{text}");
        for (is_same, says) in [(true, "are the same"), (false, "DIFFER")] {
            let text = to_text(&json!({ "same_answers": is_same }));
            assert!(text.contains(says), "{text}");
        }
        assert_eq!(to_text(&json!({ "same_answers": null })).lines().count(), 1);
    }
}
