//! Row ids in GPU memory: tokens that a GPU has sampled select rows without a round trip to the host. A launch returns
//! before it runs, and can be captured: a replay hashes the tokens that are in memory then.
// UNSAFETY: launches kernels over addresses that the caller vouches for.
#![allow(unsafe_code)]

use crate::{NgramBoundary, NgramHash};
use nvme_compute_kernel::ngrams::{NgramHead, NgramLaunch};
use nvme_compute_kernel::{BLOCK_THREADS, NGRAMS, kernel};
use nvme_host::cuda::{DeviceMemory, Gpu, KernelArgument, KernelFunction, Module};
use nvme_host::{Error, Result};
use std::mem::ManuallyDrop;
use std::sync::Arc;

/// Largest number of blocks of a launch: more than a large GPU runs at a time.
const MOST_BLOCKS: u64 = 2048;
/// Largest number of row ids of a launch.
const MOST_IDS: u64 = 1 << 40;

/// The tokens of a step, in memory of the GPU: sequences one after the other, as inference engines batch them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTokens {
    /// Address of the tokens, `i64` or `i32` each.
    pub tokens: u64,
    /// Number of tokens.
    pub count: u64,
    /// True if tokens are `i64`, false if they are `i32`.
    pub is_wide: bool,
    /// Number of sequences, at least 1.
    pub sequences: u32,
    /// Address of `sequences` + 1 `i32`: the first token of each sequence, and the end of the last one. 0 if all tokens
    /// are one sequence. Tokens of no sequence get row id -1.
    pub starts: u64,
    /// Address of the histories, [`GpuNgramHash::history_tokens`] `i64` each, the newest token last. 0 if every
    /// sequence begins with this step.
    pub histories: u64,
    /// Number of histories.
    pub history_count: u64,
    /// Address of an `i64` for each sequence, the number of its history. 0 if the histories are in the order of the
    /// sequences.
    pub slots: u64,
}

/// The hashes of one table with their constants in memory of a GPU, and the kernels that use them.
///
/// The memory is not freed when this is dropped: a launch in progress, or a graph, may still use it.
pub struct GpuNgramHash {
    module: Module,
    rows: KernelFunction,
    commit: KernelFunction,
    constants: ManuallyDrop<DeviceMemory>,
    words: NgramLaunch,
}

impl GpuNgramHash {
    /// Loads the kernels and uploads multipliers, heads and classes of tokens.
    ///
    /// # Errors
    /// The errors of [`Module::of_image`]; [`Error::Device`] without memory on the GPU.
    pub fn new(gpu: &Arc<Gpu>, hash: &NgramHash) -> Result<Self> {
        let module = Module::of_image(gpu, &NGRAMS)?;
        let mut bytes = Vec::new();
        let mut put = |word: u64| bytes.extend_from_slice(&word.to_le_bytes());
        hash.multipliers().iter().for_each(|word| put(*word));
        for head in hash.heads() {
            [head.rows, head.first_row, head.length as u64]
                .into_iter()
                .for_each(&mut put);
        }
        let heads_at = hash.multipliers().len() as u64 * 8;
        let classes_at = heads_at + (hash.heads().len() * size_of::<NgramHead>()) as u64;
        let classes = hash.classes().unwrap_or_default();
        bytes.extend(classes.iter().flat_map(|class| class.to_le_bytes()));
        let constants = DeviceMemory::new(gpu, bytes.len())?;
        constants.upload(0, &bytes)?;
        let base = constants.address();
        let words = NgramLaunch {
            heads: base + heads_at,
            multipliers: base,
            classes: hash.classes().map_or(0, |_| base + classes_at),
            known_tokens: hash.tokens(),
            padding: hash.padding(),
            head_count: hash.heads().len() as u32,
            length: hash.multipliers().len() as u32,
            ends_at_padding: u32::from(hash.boundary() == NgramBoundary::Padding),
            ..NgramLaunch::default()
        };
        Ok(Self {
            rows: module.function(kernel::NGRAM_ROWS)?,
            commit: module.function(kernel::NGRAM_COMMIT)?,
            module,
            constants: ManuallyDrop::new(constants),
            words,
        })
    }

    /// Returns the GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        self.constants.gpu()
    }

    /// Returns the number of row ids of a token.
    pub fn heads(&self) -> u32 {
        self.words.head_count
    }

    /// Returns the number of tokens of a history.
    pub fn history_tokens(&self) -> u32 {
        self.words.length - 1
    }

    /// Enqueues in `stream` the hashing of `tokens`: [`heads`](Self::heads) `i64` at `out` for each, token by token.
    /// The histories are not changed.
    ///
    /// If the model does not have a token, the ids of the n-grams with it become -1, which a gather reports as out of
    /// range. Impossible bounds of sequences and impossible numbers of histories have the same effect.
    ///
    /// # Safety
    /// The memory that `tokens` names, and `out`, is valid on the GPU until the stream has done it, and for as long as
    /// a graph that captured it may be launched; nothing else writes it meanwhile.
    ///
    /// # Errors
    /// [`Error::Usage`] for invalid addresses and numbers; [`Error::Device`] with the driver's answer.
    pub unsafe fn row_ids(&self, tokens: &StepTokens, out: u64, stream: u64) -> Result<()> {
        let heads = u64::from(self.words.head_count);
        let ids = tokens
            .count
            .checked_mul(heads)
            .filter(|ids| *ids <= MOST_IDS);
        let ids = ids.ok_or_else(|| {
            Error::usage(
                format!("{} tokens have more than 2^40 row ids", tokens.count),
                "hash fewer tokens at a time",
            )
        })?;
        let result = KernelArgument::written("out", out, ids, 8);
        let launch = NgramLaunch {
            out,
            ..self.checked(tokens, result, stream)?
        };
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.launch(self.rows, ids, &launch, stream) }
    }

    /// Enqueues in `stream` the end of a step: adds to each history the first tokens of its sequence, as many as the
    /// `i32` at `accepted` says for it, or all if that address is 0. The tokens behind them are the refused drafts.
    ///
    /// An impossible number makes the history unknown: its next n-grams get row id -1. A sequence with impossible words
    /// changes no history.
    ///
    /// # Safety
    /// As [`row_ids`](Self::row_ids); no two sequences have one history.
    ///
    /// # Errors
    /// As [`row_ids`](Self::row_ids), and without histories.
    pub unsafe fn commit(&self, tokens: &StepTokens, accepted: u64, stream: u64) -> Result<()> {
        if tokens.histories == 0 {
            return Err(Error::usage(
                "tokens are committed and there are no histories",
                "give the memory of histories",
            ));
        }
        let launch = NgramLaunch {
            accepted,
            ..self.checked(tokens, KernelArgument::read("accepted", 0, 0, 4), stream)?
        };
        let sequences = u64::from(tokens.sequences);
        let some = if accepted == 0 { 0 } else { sequences };
        let words = self.history_words(tokens);
        self.gpu().judge_apart(
            stream,
            &[
                KernelArgument::read("accepted", accepted, some, 4),
                KernelArgument::written("histories", tokens.histories, words, 8),
            ],
        )?;
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.launch(self.commit, sequences, &launch, stream) }
    }

    /// Returns the number of tokens of all histories; a product that overflows becomes a number that is refused.
    fn history_words(&self, tokens: &StepTokens) -> u64 {
        let each = u64::from(self.history_tokens());
        tokens.history_count.saturating_mul(each)
    }

    /// Returns the words of a launch over `tokens`, after a check that the kernels may use their memory.
    fn checked(
        &self,
        tokens: &StepTokens,
        result: KernelArgument<'_>,
        stream: u64,
    ) -> Result<NgramLaunch> {
        let usage = |cause: &str, remedy: &str| Err(Error::usage(cause, remedy));
        if tokens.sequences == 0 || (tokens.starts == 0 && tokens.sequences != 1) {
            return usage(
                "the number of sequences is 0, or not 1 without their starts",
                "give one sequence, or the starts of more",
            );
        }
        if tokens.slots != 0 && tokens.histories == 0 {
            return usage(
                "numbers of histories are given without histories",
                "give the memory of histories",
            );
        }
        let sequences = u64::from(tokens.sequences);
        if tokens.histories != 0 && tokens.slots == 0 && tokens.history_count < sequences {
            return Err(Error::usage(
                format!(
                    "{} histories are fewer than the {sequences} sequences",
                    tokens.history_count
                ),
                "give a history for each sequence, or their numbers",
            ));
        }
        let of = |address: u64, count: u64| if address == 0 { 0 } else { count };
        let unit = if tokens.is_wide { 8 } else { 4 };
        let words = self.history_words(tokens);
        self.gpu().judge_apart(
            stream,
            &[
                KernelArgument::read("tokens", tokens.tokens, tokens.count, unit),
                KernelArgument::read("starts", tokens.starts, of(tokens.starts, sequences + 1), 4),
                KernelArgument::read(
                    "histories",
                    tokens.histories,
                    of(tokens.histories, words),
                    8,
                ),
                KernelArgument::read("slots", tokens.slots, of(tokens.slots, sequences), 8),
                result,
            ],
        )?;
        Ok(NgramLaunch {
            tokens: tokens.tokens,
            starts: tokens.starts,
            histories: tokens.histories,
            slots: tokens.slots,
            token_count: tokens.count,
            history_count: tokens.history_count,
            sequences: tokens.sequences,
            wide_tokens: tokens.is_wide.into(),
            ..self.words
        })
    }

    /// # Safety
    /// As [`Module::launch_in`].
    unsafe fn launch(
        &self,
        function: KernelFunction,
        threads: u64,
        words: &NgramLaunch,
        stream: u64,
    ) -> Result<()> {
        let blocks = threads.div_ceil(BLOCK_THREADS.into()).min(MOST_BLOCKS);
        if blocks == 0 {
            return Ok(());
        }
        // SAFETY: the caller vouches for the addresses; both kernels take one `NgramLaunch`.
        unsafe {
            self.module
                .launch_in(stream, function, blocks as u32, BLOCK_THREADS, words)
        }
    }
}
