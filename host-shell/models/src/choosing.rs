//! Choice of pages by a GPU: summaries, ranks and tables of pages are made in its memory, in the order of a stream.
//! Ranks have the CPU's bits, and pages without a summary come first, so that a mistake makes its head NaN and is
//! counted.
// UNSAFETY: launches kernels over addresses that the caller vouches for.
#![allow(unsafe_code)]

use crate::paged::{PagedQueries, check_queries};
use crate::{KvStore, PageLimits};
use nvme_compute_kernel::choose::{ChoosePages, SummarisePages};
use nvme_compute_kernel::{BLOCK_THREADS, CHOOSE_PTX, kernel};
use nvme_host::cuda::{
    DeviceMemory, Gpu, KernelArgument as Memory, KernelFunction, LaunchSequence, Module,
};
use nvme_host::{Error, Result};
use std::sync::Arc;

/// Blocks of a launch at most.
const BLOCKS: u64 = 1024;
/// Number of pages whose summaries are uploaded together.
const AT_ONCE: u64 = 1024;

/// The summaries of the pages of a drive, in memory of a GPU: [`KvShape::summary_bytes`](crate::KvShape::summary_bytes)
/// each.
///
/// A page without a summary is chosen before all others.
pub struct PageSummaries {
    memory: DeviceMemory,
    pages: u64,
    each: u64,
}

impl PageSummaries {
    /// Allocates the summaries of all pages of `pages`, still empty.
    ///
    /// # Errors
    /// [`Error::Usage`] for more than memory has addresses; [`Error::Environment`] when the GPU has not that
    /// much memory.
    pub fn new(gpu: &Arc<Gpu>, pages: &KvStore) -> Result<Self> {
        let (count, each) = (pages.table().rows(), pages.shape().summary_bytes());
        let bytes = count
            .checked_mul(each)
            .and_then(|bytes| usize::try_from(bytes).ok());
        let bytes = bytes.ok_or_else(|| {
            Error::usage(
                format!("{count} summaries of {each} bytes exceed the address space"),
                "use fewer pages",
            )
        })?;
        let memory = DeviceMemory::new(gpu, bytes.max(16))?;
        memory.fill(0xFF)?;
        Ok(Self {
            memory,
            pages: count,
            each,
        })
    }

    /// Computes the summaries of `count` pages from `first` on by the CPU, which reads them from the store.
    ///
    /// # Errors
    /// [`Error::Usage`] for pages that do not exist; the errors of `Store::read_at` and of [`DeviceMemory::upload`].
    pub fn read(&self, pages: &KvStore, first: u64, count: u64) -> Result<()> {
        self.check(pages)?;
        let mut done = 0;
        while done < count {
            let some = (count - done).min(AT_ONCE);
            let first = first.saturating_add(done);
            let summaries = pages.summaries(first, some)?;
            self.memory
                .upload((first * self.each) as usize, &summaries)?;
            done += some;
        }
        Ok(())
    }

    /// Returns the summaries of all pages, page after page, copied to the host.
    ///
    /// # Errors
    /// The errors of [`DeviceMemory::download`].
    pub fn bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; (self.pages * self.each) as usize];
        self.memory.download(0, &mut bytes)?;
        Ok(bytes)
    }

    fn check(&self, pages: &KvStore) -> Result<()> {
        if (self.pages, self.each) == (pages.table().rows(), pages.shape().summary_bytes()) {
            return Ok(());
        }
        Err(Error::usage(
            format!(
                "{} summaries of {} bytes were made for other pages",
                self.pages, self.each
            ),
            "use those that were made for these pages",
        ))
    }
}

/// Parameters of a page selection. Addresses are the GPU's.
#[derive(Clone, Copy)]
pub struct PageSelection<'s> {
    /// Summaries of all pages that the table may name.
    pub summaries: &'s PageSummaries,
    /// Limits for each head of keys and values.
    pub keep: PageLimits,
    /// Room for ranks and for the chosen pages: [`SelectionKernels::workspace_bytes`]; a multiple of 4.
    pub workspace: u64,
}

/// The kernels that choose pages, for one GPU.
///
/// The kernels stay loaded when this is dropped: a launch in progress, or a graph, may still run them.
pub struct SelectionKernels {
    module: Module,
    summarise: KernelFunction,
    score: KernelFunction,
    choose: KernelFunction,
}

impl SelectionKernels {
    /// Loads the kernels.
    ///
    /// # Errors
    /// The errors of [`Module::embedded`].
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        let module = Module::embedded(gpu, CHOOSE_PTX.as_bytes())?;
        let (summarise, score, choose) = (
            module.function(kernel::PAGE_SUMMARIES)?,
            module.function(kernel::SCORE_PAGES)?,
            module.function(kernel::CHOOSE_PAGES)?,
        );
        Ok(Self {
            module,
            summarise,
            score,
            choose,
        })
    }

    /// Enqueues a launch in `stream` that makes the summaries of `count` pages. The bytes of page `ids[i]` lie `i` pages
    /// behind `bytes`, as for [`Table::scatter_on_gpu`](nvme_host::Table::scatter_on_gpu), which may come before or
    /// after it. An id of no page is skipped.
    ///
    /// # Safety
    /// `bytes`, and `count` `i64` at `ids`, all different, are valid on the GPU until the stream has done it, and for
    /// as long as a graph that captured it may be launched; `summaries` outlives it.
    ///
    /// # Errors
    /// [`Error::Usage`] for addresses between two words, and summaries of other pages; [`Error::Device`] with the driver's
    /// answer.
    pub unsafe fn summarise(
        &self,
        pages: &KvStore,
        summaries: &PageSummaries,
        (bytes, ids, count): (u64, u64, u64),
        stream: u64,
    ) -> Result<()> {
        summaries.check(pages)?;
        let shape = pages.shape();
        let of_pages = count.saturating_mul(shape.page_bytes() / 4);
        self.module.gpu().judge_list(
            stream,
            [
                Memory::read("pages", bytes, of_pages, 4),
                Memory::read("ids", ids, count, 8),
            ],
        )?;
        let words = SummarisePages {
            pages: bytes,
            ids,
            summaries: summaries.memory.address(),
            count,
            page_stride: shape.page_bytes(),
            page_count: pages.table().rows(),
            kv_heads: shape.kv_heads,
            head_elements: shape.head_elements,
            page_tokens: shape.page_tokens,
            is_bf16: u32::from(shape.is_bf16),
        };
        // SAFETY: the kernel takes one `SummarisePages` and stays loaded; the caller vouches for the addresses.
        unsafe { self.launch(self.summarise, words.pairs(), &words, stream) }
    }

    /// Returns the number of bytes of [`PageSelection::workspace`].
    pub fn workspace_bytes(pages: &KvStore, queries: &PagedQueries, keep: PageLimits) -> u64 {
        let rows = u64::from(queries.sequences) * u64::from(pages.shape().kv_heads);
        rows * (u64::from(queries.most_pages) + u64::from(kept(queries, keep)) + 1) * 4
    }

    /// Returns `queries` over the pages that [`choose`](Self::choose) names: for
    /// [`PagedKernels::attend`](crate::paged::PagedKernels), and to know how large its workspace has to be.
    pub fn chosen(
        pages: &KvStore,
        queries: &PagedQueries,
        choice: &PageSelection<'_>,
    ) -> PagedQueries {
        let (_, chosen, counts) = places(pages, queries, choice);
        PagedQueries {
            pages: chosen,
            counts,
            per_head: true,
            most_pages: kept(queries, choice.keep),
            ..*queries
        }
    }

    /// Enqueues the page selection in `stream`, and returns before it runs. The result is `queries` over the
    /// selected pages, whose attention comes next in the same stream. The stream may be captured; the contents
    /// of queries and tables at the time it runs count. Each head of keys and values receives the pages with
    /// the largest upper bounds of its queries' products, and those that are always selected, in the order of
    /// the table; all pages, if the table has no others. Attention over the tail is as before.
    ///
    /// The number of a page that does not exist is selected, and makes its head NaN. Products are not scaled
    /// for the selection: [`PagedQueries::scale`] has to be positive.
    ///
    /// # Safety
    /// The conditions are those of [`PagedKernels::attend`](crate::paged::PagedKernels::attend), for the memory that
    /// both arguments name; nothing writes a summary while it runs.
    ///
    /// # Errors
    /// [`Error::Usage`] for arguments that `attend` rejects, queries at an address that is no multiple of 16, a scale
    /// that is not positive, and the errors of [`PageLimits::check`]; [`Error::Device`] with the driver's answer.
    pub unsafe fn choose(
        &self,
        pages: &KvStore,
        queries: &PagedQueries,
        choice: &PageSelection<'_>,
        stream: u64,
    ) -> Result<PagedQueries> {
        check_queries(pages, queries)?;
        choice.keep.check()?;
        choice.summaries.check(pages)?;
        if queries.scale.is_nan() || queries.scale <= 0.0 {
            return Err(Error::usage(
                format!(
                    "the scale {} of the products is not a positive number",
                    queries.scale
                ),
                "use a positive scale: bounds of products are compared",
            ));
        }
        let gpu = self.module.gpu();
        let workspace = Self::workspace_bytes(pages, queries, choice.keep);
        let [of_queries, numbers, counts] = queries.tables(pages);
        gpu.judge_apart(
            stream,
            &[
                of_queries.aligned_to(16),
                numbers,
                counts,
                Memory::written("workspace", choice.workspace, workspace / 4, 4),
            ],
        )?;
        let words = words(pages, queries, choice);
        let rows = words.rows();
        let ranks = rows * u64::from(words.most_pages);
        LaunchSequence::run_kernels(self.module.gpu(), stream, |sequence| {
            for (function, threads) in [(self.score, ranks), (self.choose, rows * 32)] {
                // SAFETY: both kernels take one `ChoosePages` and stay loaded; the caller vouches for the addresses.
                sequence.kernel(|| unsafe { self.launch(function, threads, &words, stream) })?;
            }
            Ok(())
        })?;
        Ok(Self::chosen(pages, queries, choice))
    }

    /// # Safety
    /// As [`Module::launch_in`].
    unsafe fn launch<T: Copy>(
        &self,
        function: KernelFunction,
        threads: u64,
        words: &T,
        stream: u64,
    ) -> Result<()> {
        let blocks = threads.div_ceil(u64::from(BLOCK_THREADS)).min(BLOCKS);
        if blocks == 0 {
            return Ok(());
        }
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe {
            self.module
                .launch_in(stream, function, blocks as u32, BLOCK_THREADS, words)
        }
    }
}

/// Returns the limit of selected pages of a head.
fn kept(queries: &PagedQueries, keep: PageLimits) -> u32 {
    keep.pages.min(queries.most_pages)
}

/// Returns the addresses of ranks, selected pages and their counts in the workspace.
fn places(pages: &KvStore, queries: &PagedQueries, choice: &PageSelection<'_>) -> (u64, u64, u64) {
    let rows = u64::from(queries.sequences) * u64::from(pages.shape().kv_heads);
    let chosen = choice.workspace + rows * u64::from(queries.most_pages) * 4;
    let counts = chosen + rows * u64::from(kept(queries, choice.keep)) * 4;
    (choice.workspace, chosen, counts)
}

fn words(pages: &KvStore, queries: &PagedQueries, choice: &PageSelection<'_>) -> ChoosePages {
    let shape = pages.shape();
    let (ranks, chosen, chosen_counts) = places(pages, queries, choice);
    let (sequence_stride, head_stride) = queries.strides(shape.kv_heads);
    let keep = choice.keep;
    ChoosePages {
        queries: queries.queries,
        pages: queries.pages,
        counts: queries.counts,
        summaries: choice.summaries.memory.address(),
        ranks,
        chosen,
        chosen_counts,
        page_count: pages.table().rows(),
        sequences: queries.sequences,
        heads: queries.heads,
        kv_heads: shape.kv_heads,
        head_elements: shape.head_elements,
        sequence_stride,
        head_stride,
        most_pages: queries.most_pages,
        keep: kept(queries, keep),
        first: keep.first,
        last: keep.last,
        is_bf16: u32::from(shape.is_bf16),
        reserved: 0,
    }
}
