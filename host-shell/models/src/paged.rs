//! Attention over keys and values that lie in pages on a drive, which a GPU reads while it attends. A head whose
//! pages were not all read is NaN in all its queries, and is counted with the first failure's code.
// UNSAFETY: launches kernels over addresses that the caller vouches for.
#![allow(unsafe_code)]

use crate::KvStore;
use nvme_compute::extents::{optional, product};
use nvme_compute_kernel::pages::{MOST_SPLITS, QUERIES};
use nvme_compute_kernel::{BLOCK_THREADS, PAGED_PTX, PagedAttention, kernel};
use nvme_gpu_kernel::ring::{LEAST_SHIFT, MOST_SHIFT};
use nvme_gpu_kernel::rows::GatherLaunch;
use nvme_host::cuda::{
    GatherOutcome, Gpu, KernelArgument as Memory, KernelFunction, LaunchSequence, Module,
    PendingRows,
};
use nvme_host::store::status;
use nvme_host::{Error, Result};
use std::sync::Arc;

/// Warps that a launch has at most, with the stations of a store by default.
const WARPS: u32 = 256;
/// Blocks of the second kernel at most.
const JOINING: u32 = 128;

/// Queries, and the pages that each attends to. Addresses are the GPU's.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PagedQueries {
    /// `sequences` times `heads` vectors of `f32`.
    pub queries: u64,
    /// Number of sequences.
    pub sequences: u32,
    /// Number of query heads: a multiple of the number of heads of keys and values.
    pub heads: u32,
    /// Numbers of pages, `u32`: `most_pages` for each sequence, or for each head of keys and values of each sequence.
    pub pages: u64,
    /// Valid entries of `pages`, `u32`: for each sequence, or for each head of keys and values of each
    /// sequence. They lie in GPU memory, where no launch judges them: more than `most_pages` count as `most_pages`.
    pub counts: u64,
    /// True if each head has a separate page table.
    pub per_head: bool,
    /// Largest number of pages of a sequence, or of a head.
    pub most_pages: u32,
    /// Address of one page for each sequence in GPU memory, whose tokens follow those on the drive; 0 for none.
    /// A multiple of 16.
    pub tail: u64,
    /// Valid tokens of the tail page, a `u32` for each sequence; more than a page has count as a whole page.
    pub tail_counts: u64,
    /// Address of the results, with the layout of the queries.
    pub y: u64,
    /// Room for partial sums: [`PagedKernels::workspace_bytes`].
    pub workspace: u64,
    /// Scale of the products of queries and keys: usually 1 / sqrt(elements of a head).
    pub scale: f32,
}

impl PagedQueries {
    /// Returns the memory of the queries and of their page tables, as kernels access it.
    pub(crate) fn tables(&self, pages: &KvStore) -> [Memory<'static>; 3] {
        let shape = pages.shape();
        let heads = if self.per_head { shape.kv_heads } else { 1 };
        let vectors = product(&[self.sequences, self.heads, shape.head_elements]);
        let numbers = product(&[self.sequences, heads, self.most_pages]);
        let counts = if self.most_pages == 0 {
            0
        } else {
            product(&[self.sequences, heads])
        };
        [
            Memory::read("queries", self.queries, vectors, 4),
            Memory::read("pages", self.pages, numbers, 4),
            Memory::read("counts", self.counts, counts, 4),
        ]
    }

    /// Returns the distance from the pages of a sequence to those of the next, and from the pages of a head to those of
    /// the next; 0 if heads share a table.
    pub(crate) fn strides(&self, kv_heads: u32) -> (u32, u32) {
        match self.per_head {
            true => (self.most_pages * kv_heads, self.most_pages),
            false => (self.most_pages, 0),
        }
    }
}

/// The kernels of such attention, for one GPU.
///
/// The kernels stay loaded when this is dropped: a launch in progress, or a graph, may still run them.
pub struct PagedKernels {
    module: Module,
    paged: KernelFunction,
    join: KernelFunction,
}

impl PagedKernels {
    /// Loads the kernels.
    ///
    /// # Errors
    /// The errors of [`Module::embedded`].
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        let module = Module::embedded(gpu, PAGED_PTX.as_bytes())?;
        let (paged, join) = (
            module.function(kernel::ATTENTION_PAGED)?,
            module.function(kernel::ATTENTION_JOIN)?,
        );
        Ok(Self {
            module,
            paged,
            join,
        })
    }

    /// Registers and bytes of local memory of a thread, as compiled for this GPU.
    ///
    /// # Errors
    /// The errors of [`Module::cost`].
    pub fn cost(&self) -> Result<(u32, u32)> {
        self.module.cost(self.paged)
    }

    /// Returns the number of bytes of [`PagedQueries::workspace`].
    pub fn workspace_bytes(pages: &KvStore, queries: &PagedQueries) -> u64 {
        let vectors = u64::from(queries.sequences) * u64::from(queries.heads);
        let each = u64::from(pages.shape().head_elements) + 2;
        vectors * u64::from(splits(pages, queries)) * each * 4
    }

    /// # Errors
    /// [`Error::Usage`] for memory that the GPU cannot access as the kernel does.
    fn judge(&self, pages: &KvStore, queries: &PagedQueries, stream: u64) -> Result<()> {
        let page = pages.shape().page_bytes() / 2;
        let tail = u64::from(queries.sequences).saturating_mul(page);
        let tail_counts = optional(queries.tail, queries.sequences.into());
        let [of_queries, numbers, counts] = queries.tables(pages);
        let y = of_queries.bytes / 4;
        let workspace = Self::workspace_bytes(pages, queries) / 4;
        self.module.gpu().judge_apart(
            stream,
            &[
                of_queries,
                numbers,
                counts,
                Memory::read("tail", queries.tail, optional(queries.tail, tail), 2).aligned_to(16),
                Memory::read("tail_counts", queries.tail_counts, tail_counts, 4),
                Memory::written("y", queries.y, y, 4),
                Memory::written("workspace", queries.workspace, workspace, 4),
            ],
        )
    }

    /// Enqueues the attention of one query for each head in `stream`, a `CUstream` of the store's GPU, and
    /// returns before it runs. The stream may be captured; the contents of the page tables at the time it runs
    /// count.
    ///
    /// The [`PendingRows`] ends when the results are stored: the launch does not use the memory of `queries` then. Its
    /// rows are heads of keys and values, sequence after sequence. If not all pages of a head were read, or its table
    /// names a page that does not exist, the results of its queries are NaN: [`check`] makes an error of it. Queries
    /// without any token have zeros.
    ///
    /// # Safety
    /// The addresses are valid on the GPU until the stream has done it, and for as long as a graph that captured it may be
    /// launched; nothing else writes them meanwhile.
    ///
    /// # Errors
    /// [`Error::Usage`] for a store whose reads the GPU does not submit itself, heads that are no multiple, addresses
    /// between two words, and pages whose parts are longer than a command; [`Error::Environment`] with the driver's
    /// answer.
    pub unsafe fn attend(
        &self,
        pages: &KvStore,
        queries: &PagedQueries,
        stream: u64,
    ) -> Result<PendingRows> {
        check_queries(pages, queries)?;
        let words = words(pages, queries);
        let parts = words.parts();
        if parts == 0 {
            return Ok(PendingRows::nothing());
        }
        self.judge(pages, queries, stream)?;
        let piece = words.piece_bytes();
        let argument = |rows: GatherLaunch| {
            let stage_shift = piece
                .next_power_of_two()
                .ilog2()
                .clamp(LEAST_SHIFT, MOST_SHIFT);
            if 1 << stage_shift < piece || rows.slot_bytes < 1 << stage_shift {
                return Err(Error::usage(
                    format!(
                        "a head's part of a page has {piece} bytes, more than a slot of {} bytes holds",
                        rows.slot_bytes
                    ),
                    "use fewer tokens a page",
                ));
            }
            let slot_bytes = 1 << stage_shift;
            Ok(PagedAttention {
                rows: GatherLaunch { slot_bytes, ..rows },
                ..words
            })
        };
        let table = pages.table();
        let kernel = (&self.module, self.paged);
        let vectors = queries.sequences * queries.heads;
        let blocks = vectors.div_ceil(BLOCK_THREADS / 32).min(JOINING);
        LaunchSequence::run(self.module.gpu(), stream, |sequence| {
            // SAFETY: the kernels take one `PagedAttention` and stay loaded; the caller vouches for the addresses.
            let reads = unsafe { table.stream_on_gpu(kernel, parts, argument, stream) }?;
            sequence.add(reads, 0);
            // SAFETY: as above.
            sequence.kernel(|| unsafe {
                let (module, join) = (&self.module, self.join);
                module.launch_in(stream, join, blocks, BLOCK_THREADS, &words)
            })
        })
    }
}

/// Returns the argument of both kernels, still without the words of the rows.
fn words(pages: &KvStore, queries: &PagedQueries) -> PagedAttention {
    let shape = pages.shape();
    let (sequence_stride, head_stride) = queries.strides(shape.kv_heads);
    PagedAttention {
        rows: GatherLaunch::default(),
        queries: queries.queries,
        pages: queries.pages,
        counts: queries.counts,
        tail: queries.tail,
        tail_counts: queries.tail_counts,
        partial: queries.workspace,
        y: queries.y,
        sequences: queries.sequences,
        heads: queries.heads,
        kv_heads: shape.kv_heads,
        head_elements: shape.head_elements,
        page_tokens: shape.page_tokens,
        splits: splits(pages, queries),
        sequence_stride,
        head_stride,
        most_pages: queries.most_pages,
        is_bf16: u32::from(shape.is_bf16),
        scale: queries.scale,
        reserved: 0,
    }
}

/// Returns the number of parts into which the pages of a head are split, so that every warp has
/// some.
fn splits(pages: &KvStore, queries: &PagedQueries) -> u32 {
    let shape = pages.shape();
    let chunks = (queries.heads / shape.kv_heads).div_ceil(QUERIES as u32);
    let whole = u64::from(queries.sequences) * u64::from(shape.kv_heads) * u64::from(chunks);
    let wanted = u64::from(WARPS).div_ceil(whole.max(1));
    (wanted as u32).clamp(1, MOST_SPLITS.min(queries.most_pages.max(1)))
}

pub(crate) fn check_queries(pages: &KvStore, queries: &PagedQueries) -> Result<()> {
    let shape = pages.shape();
    if queries.heads == 0 || !queries.heads.is_multiple_of(shape.kv_heads) {
        return Err(Error::usage(
            format!(
                "the number of query heads, {}, is not a multiple of {}, the number of key heads",
                queries.heads, shape.kv_heads
            ),
            "use a multiple, and one head at least",
        ));
    }
    let heads = u64::from(queries.sequences) * u64::from(queries.heads);
    let table = u64::from(shape.kv_heads) * u64::from(queries.most_pages);
    if heads > u64::from(u32::MAX) || table > u64::from(u32::MAX) {
        return Err(Error::usage(
            format!(
                "{} sequences of {} pages exceed the 32 bits of a place in the table of pages",
                queries.sequences, queries.most_pages
            ),
            "use fewer than 2^32 queries, and tables of fewer numbers",
        ));
    }
    Ok(())
}

/// Checks that every page was read.
///
/// # Errors
/// [`Error::Device`] with the first head whose pages were not all read, and why.
pub fn check(pages: &KvStore, ended: GatherOutcome) -> Result<()> {
    let Some((row, code)) = ended.failures.first else {
        return Ok(());
    };
    let (what, remedy) = status::describe(code);
    let kv_heads = u64::from(pages.shape().kv_heads);
    Err(Error::device(
        format!(
            "sequence {}, head {} of its keys: {what}; {} parts of the attention are NaN",
            row / kv_heads,
            row % kv_heads,
            ended.failures.rows
        ),
        remedy,
    ))
}
