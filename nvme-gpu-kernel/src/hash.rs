//! XXH3-64 with seed 0 of bytes in memory, by one lane or by the lanes of a warp: `nvme_hash_chunks`.
//!
//! Stripes of 64 bytes are added to eight accumulators, one for each 8 bytes of a stripe, its columns. Within
//! a block of 16 stripes (1,024 bytes) the additions commute. So each lane takes one column of some stripes,
//! and the lanes add their accumulators before the scramble that ends the block. The steps and their names
//! are those of xxHash 0.8.

/// Limit of the bytes of a chunk.
pub const MOST_CHUNK_BYTES: u32 = 1 << 30;

/// Parameters of `nvme_hash_chunks`, which hashes chunks in memory; a warp takes one a turn.
///
/// Chunks may overlap and may begin at any byte; those of more than [`SHORT`] bytes are fastest if they begin
/// at a multiple of 8.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct HashChunks {
    /// Address of `count` [`HashChunk`]s in GPU memory.
    pub chunks: u64,
    /// Address that chunks are counted from. Up to 7 bytes before the first one and after the last one are
    /// loaded, too.
    pub base: u64,
    /// Address of the results: `count` hashes of 8 bytes.
    pub hashes: u64,
    /// Number of chunks.
    pub count: u64,
}

/// A range of bytes to hash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct HashChunk {
    /// First byte, counted from [`HashChunks::base`].
    pub at: u64,
    /// Number of bytes, at most [`MOST_CHUNK_BYTES`].
    pub bytes: u64,
}

/// The lanes that hash a chunk together, and access to the chunk's bytes. A lane has `COLUMNS` columns of
/// `STEPS` stripes of a block.
///
/// It separates the algorithm from the way in which bytes are loaded and sums are exchanged, so that the
/// kernel and the host share one implementation.
pub trait HashLanes<const COLUMNS: usize, const STEPS: usize> {
    /// Returns the first column and the first stripe of this lane, below 8 and below 16 / `STEPS`.
    fn place(&self) -> (u32, u32);

    /// Loads 8 bytes from byte `at` of the chunk on, a multiple of 8, little endian.
    fn load(&self, at: u32) -> u64;

    /// Loads 8 bytes from any byte on.
    fn load_any(&self, at: u32) -> u64;

    /// Loads byte `at`.
    fn byte(&self, at: u32) -> u64;

    /// Returns number `index` of [`CONSTANTS`].
    fn constant(&self, index: u32) -> u64;

    /// Returns for each column the sum over all lanes of `own`, and of `other` of the neighbouring column.
    fn join(&self, own: [u64; COLUMNS], other: [u64; COLUMNS]) -> [u64; COLUMNS];

    /// Returns the sum of the folded products of columns 0 and 1, 2 and 3, 4 and 5, 6 and 7.
    fn total(&self, columns: [u64; COLUMNS]) -> u64;
}

const STRIPE: u32 = 64;
const BLOCK: u32 = 1024;
/// Stripes of a block.
const STRIPES: u32 = 16;
/// Length up to which XXH3 has special cases.
pub const SHORT: u32 = 240;

const PRIME32_1: u64 = 0x9E37_79B1;
const PRIME32_2: u64 = 0x85EB_CA77;
const PRIME32_3: u64 = 0xC2B2_AE3D;
const PRIME64_1: u64 = 0x9E37_79B1_85EB_CA87;
const PRIME64_2: u64 = 0xC2B2_AE3D_27D4_EB4F;
const PRIME64_3: u64 = 0x1656_67B1_9E37_79F9;
const PRIME64_4: u64 = 0x85EB_CA77_C2B2_AE63;
const PRIME64_5: u64 = 0x27D4_EB2F_1656_67C5;

const FIRST: [u64; 8] = [
    PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1,
];

/// The default secret, whose 8-byte words are the keys of stripes.
const SECRET: [u64; 24] = [
    0xBE4B_A423_396C_FEB8,
    0x1CAD_21F7_2C81_017C,
    0xDB97_9083_E96D_D4DE,
    0x1F67_B3B7_A4A4_4072,
    0x78E5_C0CC_4EE6_79CB,
    0x2172_FFCC_7DD0_5A82,
    0x8E24_43F7_7446_08B8,
    0x4C26_3A81_E690_35E0,
    0xCB00_C391_BB52_283C,
    0xA32E_531B_8B65_D088,
    0x4EF9_0DA2_9748_6471,
    0xD8AC_DEA9_46EF_1938,
    0x3F34_9CE3_3F76_FAA8,
    0x1D4F_0BC7_C7BB_DCF9,
    0x3159_B4CD_4BE0_518A,
    0x6473_78D9_C97E_9FC8,
    0xC3EB_D334_83AC_C5EA,
    0xEB63_13FA_FFA0_81C5,
    0x49DA_F0B7_51DD_0D17,
    0x9E68_D429_2655_16D3,
    0xFCA1_477D_58BE_162B,
    0xCE31_D07A_D1B8_F88F,
    0x2804_1695_8F3A_CB45,
    0x7E40_4BBB_CAFB_D7AF,
];
/// Constants that lanes load: the secret, then the initial accumulators, and the keys of the last stripe and
/// of the final merge.
pub static CONSTANTS: [u64; 48] = constants();

// Offsets in `CONSTANTS`.
const SCRAMBLE: u32 = 16;
const FIRST_AT: u32 = 24;
const LAST: u32 = 32;
const MERGE: u32 = 40;

const fn constants() -> [u64; 48] {
    let (last, merge) = (keys(192 - 64 - 7), keys(11));
    let (mut all, mut index) = ([0; 48], 0);
    while index < 48 {
        all[index] = match index {
            0..24 => SECRET[index],
            24..32 => FIRST[index - 24],
            32..40 => last[index - 32],
            _ => merge[index - 40],
        };
        index += 1;
    }
    all
}

/// Returns eight words of the secret from byte `at` on.
const fn keys(at: u32) -> [u64; 8] {
    let mut keys = [0; 8];
    let mut index = 0;
    while index < 8 {
        keys[index] = secret(at + 8 * index as u32);
        index += 1;
    }
    keys
}

/// Returns 8 bytes of the secret from byte `at` on, up to 184.
#[inline(always)]
const fn secret(at: u32) -> u64 {
    let (word, shift) = (at as usize / 8, at % 8 * 8);
    let low = if word < 24 { SECRET[word] } else { 0 };
    let high = if word < 23 { SECRET[word + 1] } else { 0 };
    // Two shifts to the left instead of one, since a shift by 64 is not defined.
    low >> shift | high << 1 << (63 - shift)
}

/// Returns the hash of the first `bytes` bytes. Every lane calls it and gets the result.
#[inline(always)]
pub fn of<const COLUMNS: usize, const STEPS: usize>(
    lanes: &impl HashLanes<COLUMNS, STEPS>,
    bytes: u32,
) -> u64 {
    match bytes {
        0..=SHORT => of_short(lanes, bytes),
        _ => of_long(lanes, bytes),
    }
}

/// Returns the hash of at most [`SHORT`] bytes: each lane computes all of it.
#[inline(always)]
pub fn of_short<const COLUMNS: usize, const STEPS: usize>(
    lanes: &impl HashLanes<COLUMNS, STEPS>,
    bytes: u32,
) -> u64 {
    match bytes {
        0 => avalanche64(secret(56) ^ secret(64)),
        1..=3 => of_1_to_3(lanes, bytes),
        4..=8 => of_4_to_8(lanes, bytes),
        9..=16 => of_9_to_16(lanes, bytes),
        17..=128 => of_17_to_128(lanes, bytes),
        _ => of_129_to_240(lanes, bytes),
    }
}

/// A lane's share of the eight accumulators.
#[derive(Clone, Copy)]
struct HashSums<const COLUMNS: usize> {
    own: [u64; COLUMNS],
    other: [u64; COLUMNS],
}

impl<const COLUMNS: usize> HashSums<COLUMNS> {
    #[inline(always)]
    fn new() -> Self {
        Self {
            own: [0; COLUMNS],
            other: [0; COLUMNS],
        }
    }

    /// Adds the lane's columns of a stripe.
    #[inline(always)]
    fn add(&mut self, data: [u64; COLUMNS], keys: [u64; COLUMNS]) {
        let mut index = 0;
        while index < COLUMNS {
            let keyed = data[index] ^ keys[index];
            let product = (keyed & 0xFFFF_FFFF).wrapping_mul(keyed >> 32);
            self.own[index] = self.own[index].wrapping_add(product);
            self.other[index] = self.other[index].wrapping_add(data[index]);
            index += 1;
        }
    }
}

/// Returns the hash of more than [`SHORT`] bytes.
#[inline(always)]
pub fn of_long<const COLUMNS: usize, const STEPS: usize>(
    lanes: &impl HashLanes<COLUMNS, STEPS>,
    bytes: u32,
) -> u64 {
    let (column, group) = lanes.place();
    let groups = STRIPES / STEPS as u32;
    let table = |first: u32| -> [u64; COLUMNS] {
        core::array::from_fn(|index| lanes.constant(first + column + index as u32))
    };
    let load = |stripe: u32, from: u32| -> [u64; COLUMNS] {
        core::array::from_fn(|index| {
            lanes.load(from + stripe * STRIPE + (column + index as u32) * 8)
        })
    };
    let stripe_of = |step: usize| group + groups * step as u32;
    let keys: [[u64; COLUMNS]; STEPS] = core::array::from_fn(|step| table(stripe_of(step)));
    let scramble = table(SCRAMBLE);
    let mut sums = table(FIRST_AT);
    let blocks = (bytes - 1) / BLOCK;
    let load_block = |from: u32| -> [[u64; COLUMNS]; STEPS] {
        core::array::from_fn(|step| load(stripe_of(step), from))
    };
    if blocks != 0 {
        // The loads of a block are in flight while the block before it is added.
        let (mut next, mut block) = (load_block(0), 0);
        while block < blocks {
            let data = next;
            block += 1;
            next = load_block(block.min(blocks - 1) * BLOCK);
            let mut part = HashSums::new();
            let mut step = 0;
            while step < STEPS {
                part.add(data[step], keys[step]);
                step += 1;
            }
            let joined = lanes.join(part.own, part.other);
            sums = core::array::from_fn(|index| {
                let sum = sums[index].wrapping_add(joined[index]);
                (sum ^ sum >> 47 ^ scramble[index]).wrapping_mul(PRIME32_1)
            });
        }
    }
    // The stripes after the last whole block, and the last 64 bytes, which may overlap with them.
    let stripes = (bytes - 1 - blocks * BLOCK) / STRIPE;
    let mut part = HashSums::new();
    let mut step = 0;
    while step < STEPS {
        let stripe = stripe_of(step);
        if stripe < stripes {
            part.add(load(stripe, blocks * BLOCK), keys[step]);
        }
        step += 1;
    }
    if group == 0 {
        let at = |index: usize| bytes - STRIPE + (column + index as u32) * 8;
        let data = core::array::from_fn(|index| lanes.load_any(at(index)));
        part.add(data, table(LAST));
    }
    let joined = lanes.join(part.own, part.other);
    let merge = table(MERGE);
    let merged =
        core::array::from_fn(|index| sums[index].wrapping_add(joined[index]) ^ merge[index]);
    let begin = u64::from(bytes).wrapping_mul(PRIME64_1);
    avalanche(begin.wrapping_add(lanes.total(merged)))
}

/// Multiplies to 128 bits and returns the XOR of both halves.
#[inline(always)]
pub fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

#[inline(always)]
fn avalanche(hash: u64) -> u64 {
    let hash = (hash ^ hash >> 37).wrapping_mul(0x1656_6791_9E37_79F9);
    hash ^ hash >> 32
}

#[inline(always)]
fn avalanche64(hash: u64) -> u64 {
    let hash = (hash ^ hash >> 33).wrapping_mul(PRIME64_2);
    let hash = (hash ^ hash >> 29).wrapping_mul(PRIME64_3);
    hash ^ hash >> 32
}

#[inline(always)]
fn of_1_to_3<const COLUMNS: usize, const STEPS: usize>(
    lanes: &impl HashLanes<COLUMNS, STEPS>,
    bytes: u32,
) -> u64 {
    let (first, middle) = (lanes.byte(0), lanes.byte(bytes / 2));
    let last = lanes.byte(bytes - 1);
    let combined = first << 16 | middle << 24 | last | u64::from(bytes) << 8;
    avalanche64(combined ^ (secret(0) ^ secret(4)) & 0xFFFF_FFFF)
}

/// Loads 4 bytes from any byte on.
#[inline(always)]
fn word<const COLUMNS: usize, const STEPS: usize>(
    lanes: &impl HashLanes<COLUMNS, STEPS>,
    at: u32,
) -> u64 {
    let byte = |index: u32| lanes.byte(at + index) << (8 * index);
    byte(0) | byte(1) | byte(2) | byte(3)
}

#[inline(always)]
fn of_4_to_8<const COLUMNS: usize, const STEPS: usize>(
    lanes: &impl HashLanes<COLUMNS, STEPS>,
    bytes: u32,
) -> u64 {
    let (first, last) = (word(lanes, 0), word(lanes, bytes - 4));
    let mut hash = (last + (first << 32)) ^ secret(8) ^ secret(16);
    hash ^= hash.rotate_left(49) ^ hash.rotate_left(24);
    hash = hash.wrapping_mul(0x9FB2_1C65_1E98_DF25);
    hash ^= (hash >> 35).wrapping_add(bytes.into());
    hash = hash.wrapping_mul(0x9FB2_1C65_1E98_DF25);
    hash ^ hash >> 28
}

#[inline(always)]
fn of_9_to_16<const COLUMNS: usize, const STEPS: usize>(
    lanes: &impl HashLanes<COLUMNS, STEPS>,
    bytes: u32,
) -> u64 {
    let low = lanes.load_any(0) ^ secret(24) ^ secret(32);
    let high = lanes.load_any(bytes - 8) ^ secret(40) ^ secret(48);
    let sum = u64::from(bytes).wrapping_add(low.swap_bytes());
    avalanche(sum.wrapping_add(high).wrapping_add(fold(low, high)))
}

/// Returns [`secret`] by a load from [`CONSTANTS`].
#[inline(always)]
fn secret_of<const COLUMNS: usize, const STEPS: usize>(
    lanes: &impl HashLanes<COLUMNS, STEPS>,
    at: u32,
) -> u64 {
    let (word, shift) = (at / 8, at % 8 * 8);
    lanes.constant(word) >> shift | lanes.constant(word + 1) << 1 << (63 - shift)
}

/// Mixes 16 bytes from any byte on with the secret from byte `key` on.
#[inline(always)]
fn mix<const COLUMNS: usize, const STEPS: usize>(
    lanes: &impl HashLanes<COLUMNS, STEPS>,
    at: u32,
    key: u32,
) -> u64 {
    fold(
        lanes.load_any(at) ^ secret_of(lanes, key),
        lanes.load_any(at + 8) ^ secret_of(lanes, key + 8),
    )
}

#[inline(always)]
fn of_17_to_128<const COLUMNS: usize, const STEPS: usize>(
    lanes: &impl HashLanes<COLUMNS, STEPS>,
    bytes: u32,
) -> u64 {
    let mut hash = u64::from(bytes).wrapping_mul(PRIME64_1);
    let mut pair = 0;
    while pair <= (bytes - 1) / 32 {
        let front = mix(lanes, pair * 16, pair * 32);
        let back = mix(lanes, bytes - (pair + 1) * 16, pair * 32 + 16);
        hash = hash.wrapping_add(front).wrapping_add(back);
        pair += 1;
    }
    avalanche(hash)
}

#[inline(always)]
fn of_129_to_240<const COLUMNS: usize, const STEPS: usize>(
    lanes: &impl HashLanes<COLUMNS, STEPS>,
    bytes: u32,
) -> u64 {
    let mut hash = u64::from(bytes).wrapping_mul(PRIME64_1);
    let mut part = 0;
    while part < 8 {
        hash = hash.wrapping_add(mix(lanes, part * 16, part * 16));
        part += 1;
    }
    hash = avalanche(hash);
    while part < bytes / 16 {
        hash = hash.wrapping_add(mix(lanes, part * 16, (part - 8) * 16 + 3));
        part += 1;
    }
    avalanche(hash.wrapping_add(mix(lanes, bytes - 16, 136 - 17)))
}

/// A single lane with all columns and stripes, over bytes in host memory.
#[cfg(not(target_arch = "nvptx64"))]
struct SingleLane<'a>(&'a [u8]);

#[cfg(not(target_arch = "nvptx64"))]
impl HashLanes<8, 16> for SingleLane<'_> {
    fn place(&self) -> (u32, u32) {
        (0, 0)
    }

    fn load(&self, at: u32) -> u64 {
        self.load_any(at)
    }

    fn load_any(&self, at: u32) -> u64 {
        let bytes = self.0[at as usize..].first_chunk::<8>();
        u64::from_le_bytes(*bytes.expect("inside of the chunk"))
    }

    fn byte(&self, at: u32) -> u64 {
        self.0[at as usize].into()
    }

    fn constant(&self, index: u32) -> u64 {
        CONSTANTS[index as usize]
    }

    fn join(&self, own: [u64; 8], other: [u64; 8]) -> [u64; 8] {
        std::array::from_fn(|index| own[index].wrapping_add(other[index ^ 1]))
    }

    fn total(&self, columns: [u64; 8]) -> u64 {
        let pairs = columns.as_chunks::<2>().0.iter();
        pairs.fold(0, |sum, [a, b]| sum.wrapping_add(fold(*a, *b)))
    }
}

/// Returns the result of `nvme_hash_chunks` for `bytes`, at most [`MOST_CHUNK_BYTES`], by the same code as
/// one lane on the host.
///
/// # Panics
/// If there are more bytes.
#[cfg(not(target_arch = "nvptx64"))]
pub fn of_bytes(bytes: &[u8]) -> u64 {
    assert!(bytes.len() <= MOST_CHUNK_BYTES as usize);
    of(&SingleLane(bytes), bytes.len() as u32)
}

#[cfg(test)]
mod tests;
