//! Sparse attention: the GPU chooses the pages. Ranks and choices have to be the CPU's bit by bit.

use super::{Bench, KvShape, Outcome, PagedQueries, Report, RowFailures};
use super::{CASE, Case, Drive, Job, SHAPE, code, paged, text};
use crate::gather::fault_timeout;
use crate::limits::limit;
use nvme_host::cuda::{CudaGraph, DeviceMemory, RowRequest};
use nvme_models::PageLimits;
use nvme_models::choosing::{PageSelection, PageSummaries, SelectionKernels};
use std::time::Instant;

pub fn all(report: &mut Report, bench: &Bench) {
    for (name, is_bf16) in [("f16", false), ("bf16", true)] {
        report.test(&format!("paged/choose/shapes/{name}"), |_| {
            shapes(bench, is_bf16)
        });
    }
    report.test("paged/choose/large", |_| large(bench));
    report.test("paged/choose/ties", |_| ties(bench));
    report.test("paged/choose/all-pages", |_| all_pages(bench));
    report.test("paged/choose/missing-pages", |_| missing(bench));
    report.test("paged/choose/no-summaries", |_| no_summaries(bench));
    report.test("paged/choose/usage", |_| usage(bench));
    report.test("paged/choose/graph", |_| graph(bench));
    report.test("paged/choose/written", |_| written(bench));
    for (name, fault) in [
        ("status", "status:0x281@op=read,nth=9"),
        ("dropped", "drop@op=read,nth=9"),
    ] {
        report.test(&format!("paged/choose/fault/{name}"), |_| {
            faults(bench, fault)
        });
    }
}

/// A job, and what chooses its pages.
struct Sparse {
    job: Job,
    choosing: SelectionKernels,
    summaries: PageSummaries,
    /// The summaries as bytes, made by the CPU.
    expected: Vec<u8>,
    keep: PageLimits,
    workspace: DeviceMemory,
}

impl Sparse {
    /// Makes a job with summaries that the CPU computed from the pages on the drive.
    fn new(drive: &Drive, job: Job, keep: PageLimits) -> Outcome<Self> {
        let gpu = drive.store.gpu().ok_or("a store without a GPU")?;
        let pages = u64::from(job.case.pages);
        let summaries = PageSummaries::new(gpu, &job.oracle).map_err(text)?;
        summaries.read(&job.oracle, 0, pages).map_err(text)?;
        let expected = job.oracle.summaries(0, pages).map_err(text)?;
        let bytes = SelectionKernels::workspace_bytes(&job.pages, &job.words, keep);
        Ok(Self {
            choosing: SelectionKernels::load(gpu).map_err(text)?,
            summaries,
            expected,
            keep,
            workspace: drive.memory(&vec![0xEEu8; bytes as usize], |byte| vec![*byte])?,
            job,
        })
    }

    fn choice(&self) -> PageSelection<'_> {
        PageSelection {
            summaries: &self.summaries,
            keep: self.keep,
            workspace: self.workspace.address(),
        }
    }

    fn start_on(&self, drive: &Drive, stream: u64) -> nvme_host::Result<super::PendingRows> {
        // SAFETY: the memory outlives the launches, which are waited for.
        unsafe {
            let chosen =
                self.choosing
                    .choose(&self.job.pages, &self.job.words, &self.choice(), stream)?;
            drive.kernels.attend(&self.job.pages, &chosen, stream)
        }
    }

    fn run(&self, drive: &Drive) -> Outcome<RowFailures> {
        self.job.poison()?;
        let stream = drive.stream.handle();
        let pending = self.start_on(drive, stream).map_err(text)?;
        let ended = pending.wait(limit()).map_err(text)?;
        drive.stream.finish().map_err(text)?;
        self.check(ended.failures)?;
        Ok(ended.failures)
    }

    /// Returns the queries of the heads that share the keys of a head.
    fn queries(&self, sequence: u32, kv_head: u32) -> Vec<&[f32]> {
        let case = &self.job.case;
        let elements = case.shape.head_elements as usize;
        let row = (sequence * case.shape.kv_heads + kv_head) as usize;
        let each = case.group as usize * elements;
        let mine = &self.job.queries[row * each..][..each];
        mine.chunks(elements).collect()
    }

    fn expected(&self, sequence: u32, kv_head: u32) -> Outcome<Vec<u32>> {
        let queries = self.queries(sequence, kv_head);
        let table = self.job.table(sequence, kv_head);
        let oracle = &self.job.oracle;
        oracle
            .choose(&queries, table, kv_head, &self.expected, self.keep)
            .map_err(text)
    }

    /// Checks ranks, choices, and attention over what was chosen.
    fn check(&self, failures: RowFailures) -> Outcome<()> {
        let case = &self.job.case;
        let shape = case.shape;
        let mut bytes = vec![0; self.workspace.len()];
        self.workspace.download(0, &mut bytes).map_err(text)?;
        let words = bytes.as_chunks::<4>().0.iter();
        let words: Vec<u32> = words.map(|word| u32::from_le_bytes(*word)).collect();
        let rows = (case.sequences * shape.kv_heads) as usize;
        let most = case.most_pages as usize;
        let kept = case.most_pages.min(self.keep.pages) as usize;
        let (ranks, rest) = words.split_at(rows * most);
        let (chosen, counts) = rest.split_at(rows * kept);
        for row in 0..rows {
            let (sequence, kv_head) = (row as u32 / shape.kv_heads, row as u32 % shape.kv_heads);
            let queries = self.queries(sequence, kv_head);
            for (place, id) in self.job.table(sequence, kv_head).iter().enumerate() {
                let each = shape.summary_bytes() as usize;
                let summary = self.expected.get(*id as usize * each..);
                let expected = shape.rank(summary.unwrap_or_default(), kv_head, &queries);
                let found = ranks[row * most + place];
                if found != expected {
                    return Err(format!(
                        "head {row}, page {id}: rank {found:#x}, not {expected:#x}"
                    ));
                }
            }
            let expected = self.expected(sequence, kv_head)?;
            let count = (counts[row] as usize).min(kept);
            let found = &chosen[row * kept..][..count];
            if found != expected {
                return Err(format!("head {row}: {found:?} chosen, not {expected:?}"));
            }
        }
        self.job.check_over(failures, |sequence, kv_head| {
            self.expected(sequence, kv_head)
        })
    }
}

const KEEP: PageLimits = PageLimits {
    pages: 12,
    first: 1,
    last: 2,
};

fn shapes(bench: &Bench, is_bf16: bool) -> Outcome<String> {
    let drive = Drive::new(bench, 512, "", limit())?;
    let mut done = 0;
    for (kv_heads, head_elements, page_tokens) in [
        (1, 64, 16),
        (2, 128, 8),
        (3, 32, 32),
        (2, 96, 64),
        (4, 8, 16),
    ] {
        let shape = KvShape {
            kv_heads,
            head_elements,
            page_tokens,
            is_bf16,
        };
        for (sequences, group, per_head, most_pages, has_tail, keep) in [
            (1, 1, false, 1, false, (1, 0, 0)),
            (1, 8, false, 33, true, (4, 0, 0)),
            (4, 3, true, 7, true, (3, 1, 1)),
            (5, 9, false, 40, false, (16, 2, 3)),
            (3, 17, true, 65, true, (5, 2, 3)),
        ] {
            let case = Case {
                shape,
                sequences,
                group,
                per_head,
                most_pages,
                pages: 50,
                has_tail,
            };
            let (pages, first, last) = keep;
            let keep = PageLimits { pages, first, last };
            let job = Job::new(&drive, case, u64::from(kv_heads * 100 + sequences))?;
            let failures = Sparse::new(&drive, job, keep)?.run(&drive)?;
            if failures.rows != 0 {
                return Err(format!("{shape:?}: {failures:?}"));
            }
            done += 1;
        }
    }
    let case = Case {
        sequences: 0,
        ..CASE
    };
    Sparse::new(&drive, Job::new(&drive, case, 1)?, KEEP)?.run(&drive)?;
    Ok(format!("{done} shapes"))
}

/// Tables of many pages, of which a few are chosen, and more than a warp looks at in one pass.
fn large(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 4096, "", limit())?;
    let case = Case {
        most_pages: 3000,
        pages: 400,
        per_head: true,
        ..CASE
    };
    let mut done = 0;
    for (seed, pages) in [(1, 1), (2, 100), (3, 2999)] {
        let keep = PageLimits {
            pages,
            first: 0,
            last: 1,
        };
        let sparse = Sparse::new(&drive, Job::new(&drive, case, seed)?, keep)?;
        let failures = sparse.run(&drive)?;
        if failures.rows != 0 {
            return Err(format!("{failures:?}"));
        }
        done += 1;
    }
    Ok(format!("{done} choices of 3000 pages"))
}

/// All pages have the same keys: those that come first in the table are chosen.
fn ties(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 4096, "", limit())?;
    let mut job = Job::new(&drive, CASE, 3)?;
    let bytes = SHAPE.page_bytes();
    let mut page = vec![0; bytes as usize];
    job.oracle
        .store()
        .read_at(job.oracle.table().offset(), &mut page)
        .map_err(text)?;
    for pages in [&job.oracle, &job.pages] {
        for id in 0..u64::from(CASE.pages) {
            let at = pages.table().offset() + id * bytes;
            pages.store().write_at(at, &page).map_err(text)?;
        }
    }
    for (at, id) in job.ids.iter_mut().enumerate() {
        *id = (at as u32 * 37 + 5) % CASE.pages;
    }
    let words: Vec<u8> = job.ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    job.device_ids.upload(0, &words).map_err(text)?;
    let sparse = Sparse::new(&drive, job, KEEP)?;
    let table = sparse.job.table(0, 0);
    let first_and_last: Vec<u32> = [&table[..10], &table[38..]].concat();
    if sparse.expected(0, 0)? != first_and_last {
        return Err("the CPU chooses others".to_owned());
    }
    match sparse.run(&drive)?.rows {
        0 => Ok("the first of equal pages".to_owned()),
        rows => Err(format!("{rows} parts failed")),
    }
}

/// All pages are selected: the results have the bits of attention over all pages.
fn all_pages(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 4096, "", limit())?;
    let keep = PageLimits {
        pages: 100,
        first: 3,
        last: 90,
    };
    let sparse = Sparse::new(&drive, Job::new(&drive, CASE, 4)?, keep)?;
    let results = || -> Outcome<Vec<u8>> {
        let mut bytes = vec![0; sparse.job.y.len()];
        sparse.job.y.download(0, &mut bytes).map_err(text)?;
        Ok(bytes)
    };
    let failed = sparse.job.run(&drive)?.rows;
    let full = results()?;
    let failed = failed + sparse.run(&drive)?.rows;
    match (failed, results()? == full) {
        (0, true) => Ok("the same bits".to_owned()),
        other => Err(format!("{other:?}")),
    }
}

/// A page that is not there is chosen, so that its head is NaN, and no other.
fn missing(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 4096, "", limit())?;
    let case = Case {
        sequences: 4,
        per_head: true,
        ..CASE
    };
    let mut job = Job::new(&drive, case, 6)?;
    for (head, id) in [(0, 100u32), (4, u32::MAX)] {
        let at = head * case.most_pages as usize + 20;
        job.ids[at] = id;
        job.device_ids
            .upload(at * 4, &id.to_le_bytes())
            .map_err(text)?;
    }
    let failures = Sparse::new(&drive, job, KEEP)?.run(&drive)?;
    match failures.first {
        Some((0, code::OUT_OF_RANGE)) if failures.rows == 2 => Ok("2 heads of 8".to_owned()),
        _ => Err(format!("{failures:?}")),
    }
}

/// Pages without a summary are chosen before all others.
fn no_summaries(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 4096, "", limit())?;
    let mut sparse = Sparse::new(&drive, Job::new(&drive, CASE, 7)?, KEEP)?;
    let gpu = drive.store.gpu().ok_or("a store without a GPU")?;
    sparse.summaries = PageSummaries::new(gpu, &sparse.job.pages).map_err(text)?;
    sparse
        .summaries
        .read(&sparse.job.oracle, 0, 90)
        .map_err(text)?;
    let known = 90 * SHAPE.summary_bytes() as usize;
    sparse.expected[known..].fill(0xFF);
    if sparse.summaries.bytes().map_err(text)? != sparse.expected {
        return Err("other summaries than those of the CPU".to_owned());
    }
    match sparse.run(&drive)?.rows {
        0 => Ok("10 pages of 100".to_owned()),
        rows => Err(format!("{rows} parts failed")),
    }
}

fn usage(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 512, "", limit())?;
    let sparse = Sparse::new(&drive, Job::new(&drive, CASE, 1)?, KEEP)?;
    let stream = drive.stream.handle();
    type Change = fn(&mut PagedQueries, &mut PageSelection<'_>);
    let changed: [(&str, Change); 6] = [
        ("no heads", |words, _| words.heads = 0),
        ("queries at no multiple of 16", |words, _| {
            words.queries += 4
        }),
        ("a scale below zero", |words, _| words.scale = -1.0),
        ("an odd workspace", |_, choice| choice.workspace += 2),
        ("no pages", |_, choice| choice.keep.pages = 0),
        ("more at the ends than all", |_, choice| {
            choice.keep.last = 12
        }),
    ];
    for (what, change) in changed {
        let (mut words, mut choice) = (sparse.job.words, sparse.choice());
        change(&mut words, &mut choice);
        // SAFETY: the call is refused and launches nothing.
        let refused = unsafe {
            sparse
                .choosing
                .choose(&sparse.job.pages, &words, &choice, stream)
        };
        if refused.map(drop).map_err(|error| error.exit_code()) != Err(2) {
            return Err(format!("{what} is not refused"));
        }
    }
    // SAFETY: the call is refused and launches nothing.
    let refused = unsafe {
        let words = (2, 8, 1);
        sparse
            .choosing
            .summarise(&sparse.job.pages, &sparse.summaries, words, stream)
    };
    if refused.map_err(|error| error.exit_code()) != Err(2) {
        return Err("pages between two words are not refused".to_owned());
    }
    let other = Case { pages: 99, ..CASE };
    let other = Job::new(&drive, other, 1)?;
    if sparse.summaries.read(&other.pages, 0, 1).is_ok() {
        return Err("summaries of other pages are not refused".to_owned());
    }
    sparse.run(&drive)?;
    Ok("8 refused".to_owned())
}

/// A graph chooses by the queries that are there when it is launched.
fn graph(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 4096, "", limit())?;
    let mut sparse = Sparse::new(&drive, Job::new(&drive, CASE, 9)?, KEEP)?;
    let captured = CudaGraph::capture(&drive.stream, |stream| sparse.start_on(&drive, stream));
    let (graph, pending) = captured.map_err(text)?;
    let mut choices = Vec::new();
    for round in 1..=3u32 {
        for (at, query) in sparse.job.queries.iter_mut().enumerate() {
            *query = ((at as u32 * 7919 + round * 104_729) % 4001) as f32 / 1000.0 - 2.0;
        }
        let values = sparse.job.queries.iter();
        let bytes: Vec<u8> = values.flat_map(|query| query.to_le_bytes()).collect();
        sparse.job._memory[0].upload(0, &bytes).map_err(text)?;
        sparse.job.poison()?;
        graph.launch(&drive.stream).map_err(text)?;
        drive.stream.finish().map_err(text)?;
        if pending.ended() != round {
            return Err(format!("launch {round} does not end"));
        }
        sparse.check(pending.last().failures)?;
        paged::check(&sparse.job.pages, pending.last()).map_err(text)?;
        choices.push(sparse.expected(0, 0)?);
    }
    match choices[0] != choices[1] && choices[1] != choices[2] {
        true => Ok("3 launches with other queries".to_owned()),
        false => Err("other queries choose the same pages".to_owned()),
    }
}

/// New pages: written, summarised, chosen and attended to in one stream, with no host between.
fn written(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 4096, "", limit())?;
    let mut sparse = Sparse::new(&drive, Job::new(&drive, CASE, 11)?, KEEP)?;
    let shape = SHAPE;
    let mut throw = super::dice(77);
    let ids: Vec<i64> = (0..CASE.pages.into()).step_by(3).collect();
    let image = super::halves(shape, shape.page_bytes() * ids.len() as u64, &mut throw);
    let source = drive.memory(&image, |byte| vec![*byte])?;
    let numbers = drive.memory(&ids, |id| id.to_le_bytes().to_vec())?;
    for (id, page) in ids.iter().zip(image.chunks(shape.page_bytes() as usize)) {
        let at = sparse.job.oracle.table().offset() + *id as u64 * shape.page_bytes();
        sparse.job.oracle.store().write_at(at, page).map_err(text)?;
    }
    let pages = u64::from(CASE.pages);
    sparse.expected = sparse.job.oracle.summaries(0, pages).map_err(text)?;
    sparse.job.poison()?;
    let stream = drive.stream.handle();
    let count = ids.len() as u64;
    let request = RowRequest {
        ids: numbers.address(),
        wide_ids: true,
        count,
        out: source.address(),
        out_stride: shape.page_bytes(),
        status: 0,
    };
    let table = sparse.job.pages.table();
    // SAFETY: the memory outlives the launches, which are waited for.
    let (write, pending) = unsafe {
        let write = table.scatter_on_gpu(&request, stream).map_err(text)?;
        let words = (source.address(), numbers.address(), count);
        sparse
            .choosing
            .summarise(&sparse.job.pages, &sparse.summaries, words, stream)
            .map_err(text)?;
        (write, sparse.start_on(&drive, stream).map_err(text)?)
    };
    let written = write.wait(limit()).map_err(text)?.failures;
    let read = pending.wait(limit()).map_err(text)?.failures;
    drive.stream.finish().map_err(text)?;
    if sparse.summaries.bytes().map_err(text)? != sparse.expected {
        return Err("other summaries than those of the CPU".to_owned());
    }
    sparse.check(read)?;
    match (written.rows, read.rows) {
        (0, 0) => Ok(format!("{count} new pages")),
        other => Err(format!("{other:?} failed")),
    }
}

/// Heads of which a chosen page was not read are NaN and counted; later ones are whole.
fn faults(bench: &Bench, fault: &str) -> Outcome<String> {
    let drive = Drive::new(bench, 4096, fault, fault_timeout(bench, fault))?;
    let sparse = Sparse::new(&drive, Job::new(&drive, CASE, 8)?, KEEP)?;
    let (begin, mut failed) = (Instant::now(), 0);
    while begin.elapsed() < limit() {
        let failures = sparse.run(&drive)?;
        failed += failures.rows;
        if failures.rows == 0 && failed > 0 {
            return Ok(format!("{failed} parts failed, then none"));
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    Err(format!("{failed} parts failed"))
}
