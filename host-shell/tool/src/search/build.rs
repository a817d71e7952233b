//! `search build`: an index of vectors of a file, or of generated ones.

use super::input::InputArgs;
use super::place::IndexPlace;
use crate::common::file::CreatedFile;
use crate::common::images::CommandFiles;
use crate::common::{WriteArgs, check_stop, number, output, progress, say};
use clap::Args;
use nvme_host::store::path_of_file;
use nvme_host::{Error, Result, Store, units};
use nvme_search::{
    BuildOptions, BuildPhase, HEADER_BYTES, IndexHeader, MOST_DEGREE, MOST_ELEMENTS,
    VectorDistribution, VectorMetric, VectorSet, VectorSource, build,
};
use serde_json::json;
use std::path::Path;
use std::time::{Duration, Instant};

/// Queues of the CPU.
const QUEUES: u32 = 8;

/// Make the graph and index of vectors, of a file or generated, with all threads of the CPU
#[derive(Args)]
pub struct BuildCommand {
    /// Output: a device, or a file (file:PATH, /PATH, ./PATH), which is made if missing
    #[arg(long = "out", short = 'o', value_name = "DEVICE")]
    device: String,
    #[command(flatten)]
    place: IndexPlace,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    input: InputArgs,
    /// Distribution of generated vectors: around 256 centres, or even, the hard case
    #[arg(long, value_name = "KIND", default_value = "clustered", value_parser = kind, conflicts_with = "input")]
    vectors: VectorDistribution,
    /// Vectors
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = number::<u32>(1..=0x7FFF_FFFF), conflicts_with = "input")]
    count: u32,
    /// Elements of a vector: 128 of generated ones when missing; --element needs it
    #[arg(long, value_name = "N", value_parser = number::<u32>(1..=MOST_ELEMENTS.into()))]
    dim: Option<u32>,
    /// Measure: euclidean, cosine, or inner_product, where the greatest is the nearest
    #[arg(long, value_name = "METRIC", default_value = "euclidean", value_parser = metric)]
    metric: VectorMetric,
    /// Other vectors for another number
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = number::<u64>(0..=u64::MAX), conflicts_with = "input")]
    seed: u64,
    /// Neighbours of a node at most
    #[arg(long, value_name = "N", default_value_t = MOST_DEGREE, value_parser = number::<u32>(1..=MOST_DEGREE.into()))]
    degree: u32,
    /// Candidates of a search while the graph is made: more make a better graph, and take longer
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = number::<u32>(1..=1000))]
    build_list: u32,
    /// Elements for each byte in memory: 4, or all of a shorter vector, when missing
    #[arg(long, value_name = "N", value_parser = number::<u32>(1..=MOST_ELEMENTS.into()))]
    sub_dim: Option<u32>,
}

impl BuildCommand {
    pub fn run(self, files: &CommandFiles) -> Result<()> {
        let file = self.input.open(self.dim)?;
        let begin = Instant::now();
        let (source, vectors) = match file {
            // Known before a file is made for the index.
            Some(file) => {
                let vectors = file.vectors()?;
                (VectorSource::given(&vectors), Some(vectors))
            }
            None => {
                let elements = self.dim.unwrap_or(128);
                let source = VectorSource {
                    kind: self.vectors,
                    seed: self.seed,
                    count: self.count,
                    elements,
                };
                (source, None)
            }
        };
        let options = BuildOptions {
            degree: self.degree,
            list: self.build_list,
            sub_elements: self.sub_dim.unwrap_or(source.elements.min(4)),
            metric: self.metric,
        };
        let created = self.create(&source, options)?;
        let built = self.build((source, vectors), options, begin);
        if let (Err(_), Some(file)) = (&built, created) {
            // The incomplete file is no index.
            file.remove();
        }
        let (header, store, times) = built?;
        files.keep_created();
        self.report(&header, &store, times)
    }

    /// Makes the index, and returns it with its store and the times of vectors, graph and writes.
    fn build(
        &self,
        (source, vectors): (VectorSource, Option<VectorSet>),
        options: BuildOptions,
        begin: Instant,
    ) -> Result<(IndexHeader, Store, [Duration; 3])> {
        let store = self.store()?;
        let vectors = vectors.map_or_else(|| source.vectors(), Ok)?;
        let count = u64::from(source.count);
        let bar = progress::items(2 * count, "build");
        let (mut made, mut in_graph) = (begin.elapsed(), Duration::ZERO);
        let mut hear = |step| {
            check_stop()?;
            match step {
                BuildPhase::Graph(done) => {
                    in_graph = begin.elapsed();
                    bar.set_position(done);
                }
                BuildPhase::Write(done) => bar.set_position(count + done),
            }
            Ok(())
        };
        let header = build(
            &store,
            self.place.offset,
            (source, &vectors),
            options,
            &mut hear,
        )?;
        bar.finish_and_clear();
        if in_graph < made {
            // There is only one vector, so that no graph was made.
            in_graph = made;
        }
        let all = begin.elapsed();
        made = made.min(all);
        Ok((header, store, [made, in_graph - made, all - in_graph]))
    }

    /// Creates the file for the index, if it does not exist.
    fn create(&self, source: &VectorSource, options: BuildOptions) -> Result<Option<CreatedFile>> {
        let Some(path) = path_of_file(&self.device).map(Path::new) else {
            return Ok(None);
        };
        if path.exists() {
            return Ok(None);
        }
        let header = IndexHeader {
            source: *source,
            sub_elements: options.sub_elements,
            degree: options.degree,
            entry: 0,
            tag: 0,
            centroids_sum: 0,
            codes_sum: 0,
            metric: options.metric,
            longest: 0.0,
        };
        let bytes = self.place.offset.checked_add(header.bytes_of_index());
        let created = CreatedFile::create(path).map_err(Error::file("create", path))?;
        let extended = created.file.set_len(bytes.unwrap_or(HEADER_BYTES as u64));
        if let Err(error) = extended {
            created.remove();
            return Err(Error::file("extend", path)(error));
        }
        Ok(Some(created))
    }

    fn store(&self) -> Result<Store> {
        let mut options = self.place.options(QUEUES);
        options.allow_write = self.write.allow_write;
        if path_of_file(&self.device).is_some() {
            return Store::open(&self.device, &options);
        }
        let device = nvme_host::open(&self.device)?;
        self.write.check(&*device, "search build")?;
        Store::over(device, &options)
    }

    fn report(&self, header: &IndexHeader, store: &Store, times: [Duration; 3]) -> Result<()> {
        let seconds = times.map(|time| time.as_secs_f64());
        let memory = header.centroids_bytes() + header.codes_bytes();
        let source = header.source;
        if self.place.form.json {
            return output::json(&json!({
                "device": store.path().device,
                "offset": self.place.offset,
                "vectors": source.kind.name(), "count": source.count, "dim": source.elements, "seed": source.seed,
                "metric": header.metric.name(), "longest": header.longest, "degree": self.degree, "build_list": self.build_list, "sub_dim": header.sub_elements,
                "bytes": header.bytes_of_index(), "memory_bytes": memory,
                "vectors_s": seconds[0], "graph_s": seconds[1], "write_s": seconds[2],
            }));
        }
        say::show(&format!(
            "{} {} vectors of {}: {} on {}, {} in memory\nvectors {:.1} s, graph {:.1} s, written in {:.1} s\n",
            source.count,
            source.kind.name(),
            source.elements,
            units::bytes(header.bytes_of_index()),
            store.path().device,
            units::bytes(memory),
            seconds[0],
            seconds[1],
            seconds[2],
        ));
        Ok(())
    }
}

fn metric(text: &str) -> std::result::Result<VectorMetric, String> {
    let found = VectorMetric::of_name(text);
    found.ok_or_else(|| {
        format!("no metric is called '{text}'; there are euclidean, cosine, inner_product")
    })
}

fn kind(text: &str) -> std::result::Result<VectorDistribution, String> {
    let mut generated = VectorDistribution::ALL
        .into_iter()
        .filter(|kind| *kind != VectorDistribution::Given);
    let found = generated.find(|kind| kind.name() == text);
    found.ok_or_else(|| format!("no vectors are called '{text}'; there are clustered, uniform"))
}
