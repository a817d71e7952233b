//! `nvme_ngram_rows` and `nvme_ngram_commit`.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::{IMAGE, NO_ROW, NgramHead, NgramLaunch, UNKNOWN};
use nvme_gpu_kernel::{arch, entry};

/// Returns the number of this thread among those of the launch, and the number of threads.
#[inline(always)]
fn thread() -> (u64, u64) {
    let of_block = u64::from(arch::block_threads());
    let mine = u64::from(arch::block()) * of_block + u64::from(arch::thread());
    (mine, u64::from(arch::blocks()) * of_block)
}

/// # Safety
/// The address is valid and a multiple of 4; nothing writes to it meanwhile.
#[inline(always)]
unsafe fn load_i32(address: u64) -> i32 {
    // SAFETY: this function's caller vouches for the address.
    unsafe { (address as usize as *const i32).read() }
}

/// # Safety
/// The address is valid and a multiple of 8; nothing else writes to it meanwhile.
#[inline(always)]
unsafe fn load_u64(address: u64) -> u64 {
    // SAFETY: this function's caller vouches for the address.
    unsafe { (address as usize as *const u64).read() }
}

/// # Safety
/// The address is valid and a multiple of 8; no other thread uses it meanwhile.
#[inline(always)]
unsafe fn store_i64(address: u64, value: i64) {
    // SAFETY: this function's caller vouches for the address.
    unsafe { (address as usize as *mut i64).write(value) }
}

/// Tokens of one sequence: those of the launch, and its history before them. Without a reference to the launch, which an
/// `Option` would put on a stack.
#[derive(Clone, Copy)]
struct TokenSequence {
    /// Its first token, and the number of its tokens.
    first: u64,
    count: u64,
    /// Address of its history; 0 for none.
    history: u64,
}

impl NgramLaunch {
    /// Returns sequence `sequence`, if the words about it can be.
    ///
    /// # Safety
    /// Every address in the launch is valid as [`NgramLaunch`] documents.
    #[inline(always)]
    unsafe fn sequence(&self, sequence: u64) -> Option<TokenSequence> {
        let (mut first, mut end) = (0, self.token_count as i64);
        if self.starts != 0 {
            let at = self.starts + sequence * 4;
            // SAFETY: the caller vouches for one word more than there are sequences.
            (first, end) = unsafe { (load_i32(at).into(), load_i32(at + 4).into()) };
        }
        if first < 0 || end < first || end as u64 > self.token_count {
            return None;
        }
        let mut history = 0;
        if self.histories != 0 {
            let mut number = sequence;
            if self.slots != 0 {
                // SAFETY: the caller vouches for a word for each sequence.
                number = unsafe { load_u64(self.slots + sequence * 8) };
            }
            if number >= self.history_count {
                return None;
            }
            history = self.histories + number * u64::from(self.length - 1) * 8;
        }
        Some(TokenSequence {
            first: first as u64,
            count: (end - first) as u64,
            history,
        })
    }

    /// Returns the number of the sequence that token `token` belongs to, if any says so.
    ///
    /// # Safety
    /// As [`sequence`](Self::sequence).
    #[inline(always)]
    unsafe fn sequence_of(&self, token: u64) -> u64 {
        if self.starts == 0 {
            return 0;
        }
        // The last sequence that begins at or before the token: those without tokens come before it.
        let (mut low, mut high) = (0, u64::from(self.sequences));
        while high - low > 1 {
            let middle = (low + high) / 2;
            // SAFETY: the caller vouches for the words.
            match i64::from(unsafe { load_i32(self.starts + middle * 4) }) <= token as i64 {
                true => low = middle,
                false => high = middle,
            }
        }
        low
    }
}

impl TokenSequence {
    /// Returns the token `back` tokens before token `at` of the sequence.
    ///
    /// # Safety
    /// As [`NgramLaunch::sequence`]; `at` is below `count`, `back` below the launch's `length`.
    #[inline(always)]
    unsafe fn back(&self, launch: &NgramLaunch, at: u64, back: u64) -> i64 {
        match at.checked_sub(back) {
            // SAFETY: the caller's.
            Some(at) => unsafe { self.token(launch, at) },
            // SAFETY: as above.
            None => unsafe { self.before(launch, back - at) },
        }
    }

    /// Returns token `at` of the sequence.
    ///
    /// # Safety
    /// As [`back`](Self::back).
    #[inline(always)]
    unsafe fn token(&self, launch: &NgramLaunch, at: u64) -> i64 {
        let index = self.first + at;
        match launch.wide_tokens {
            // SAFETY: the caller vouches for the `count` tokens of the sequence.
            0 => i64::from(unsafe { load_i32(launch.tokens + index * 4) }),
            // SAFETY: as above.
            _ => unsafe { load_u64(launch.tokens + index * 8) as i64 },
        }
    }

    /// Returns the token `steps` before the first one of the sequence, from 1 on.
    ///
    /// # Safety
    /// As [`back`](Self::back).
    #[inline(always)]
    unsafe fn before(&self, launch: &NgramLaunch, steps: u64) -> i64 {
        match self.history {
            0 => launch.padding,
            history => {
                let at = u64::from(launch.length - 1) - steps;
                // SAFETY: the caller vouches for the history.
                unsafe { load_u64(history + at * 8) as i64 }
            }
        }
    }

    /// Returns the row id of `head` for token `at` of the sequence.
    ///
    /// # Safety
    /// As [`back`](Self::back).
    #[inline(always)]
    unsafe fn row(&self, launch: &NgramLaunch, at: u64, head: &NgramHead) -> i64 {
        let (mut hash, mut back, mut is_hidden) = (0u64, 0, false);
        while back < head.length {
            // SAFETY: the caller's.
            let token = unsafe { self.back(launch, at, back) };
            let is_image = launch.ends_at_padding == 0 && token == IMAGE;
            if !is_image && token as u64 >= launch.known_tokens {
                return NO_ROW;
            }
            is_hidden |= is_image;
            let mut class = if is_hidden { launch.padding } else { token } as u64;
            if launch.classes != 0 {
                // SAFETY: the caller vouches for the class of each token that the model has.
                class = u64::from(unsafe { load_i32(launch.classes + class * 4) } as u32);
            }
            // SAFETY: the caller vouches for `length` multipliers.
            let multiplier = unsafe { load_u64(launch.multipliers + back * 8) };
            hash ^= class.wrapping_mul(multiplier);
            // The end of a text hides what is older from the tokens behind it, and not from itself.
            is_hidden |= launch.ends_at_padding != 0 && back > 0 && token == launch.padding;
            back += 1;
        }
        match hash.checked_rem(head.rows) {
            Some(row) => (head.first_row + row) as i64,
            None => NO_ROW,
        }
    }
}

entry! {
    /// Writes the row ids of tokens. A thread works out one id of a token a turn; any number of blocks and threads.
    ///
    /// # Safety
    /// Every address in `launch` is valid as [`NgramLaunch`] documents; nothing else writes what it reads.
    pub unsafe fn nvme_ngram_rows(launch: NgramLaunch) {
        let heads = u64::from(launch.head_count);
        let (mut index, threads) = thread();
        while index < launch.ids() {
            let (token, number) = (index / heads, index % heads);
            let at = launch.heads + number * size_of::<NgramHead>() as u64;
            // SAFETY: the host vouches for the heads.
            let head = unsafe {
                NgramHead {
                    rows: load_u64(at),
                    first_row: load_u64(at + 8),
                    length: load_u64(at + 16),
                }
            };
            let mut row = NO_ROW;
            // SAFETY: the host vouches for all that the launch names; the token is inside of the sequence.
            unsafe {
                if let Some(sequence) = launch.sequence(launch.sequence_of(token))
                    && token.wrapping_sub(sequence.first) < sequence.count
                {
                    row = sequence.row(&launch, token - sequence.first, &head);
                }
                store_i64(launch.out + index * 8, row);
            }
            index += threads;
        }
    }
}

entry! {
    /// Adds the tokens that stand to the histories. A thread takes one sequence a turn; any number of blocks and threads.
    ///
    /// # Safety
    /// As [`nvme_ngram_rows`]; no two sequences have one history.
    pub unsafe fn nvme_ngram_commit(launch: NgramLaunch) {
        let (mut index, threads) = thread();
        while index < u64::from(launch.sequences) {
            // SAFETY: the host vouches for all that the launch names.
            unsafe {
                if let Some(sequence) = launch.sequence(index)
                    && sequence.history != 0
                {
                    let mut accepted = sequence.count as i64;
                    if launch.accepted != 0 {
                        accepted = load_i32(launch.accepted + index * 4).into();
                    }
                    let is_right = accepted >= 0 && accepted as u64 <= sequence.count;
                    let history = u64::from(launch.length - 1);
                    let mut to = 0;
                    while to < history {
                        // Of history and tokens in a row. It is never before `to`, so that nothing is lost.
                        let from = accepted.wrapping_add(to as i64) as u64;
                        let token = match from.checked_sub(history) {
                            _ if !is_right => UNKNOWN,
                            None => load_u64(sequence.history + from * 8) as i64,
                            Some(at) => sequence.token(&launch, at),
                        };
                        store_i64(sequence.history + to * 8, token);
                        to += 1;
                    }
                }
            }
            index += threads;
        }
    }
}
