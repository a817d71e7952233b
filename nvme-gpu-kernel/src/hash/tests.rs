use super::{CONSTANTS, HashLanes, fold, of, of_bytes};
use proptest::prelude::*;
use std::sync::{Barrier, Mutex};
use xxhash_rust::xxh3::xxh3_64;

fn data(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let words = std::iter::repeat_with(|| {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
        (state >> 56) as u8
    });
    words.take(bytes).collect()
}

#[test]
fn every_length_has_the_hash_of_the_reference() {
    let data = data(5000, 1);
    for bytes in 0..=data.len() {
        let data = &data[..bytes];
        assert_eq!(of_bytes(data), xxh3_64(data), "{bytes} bytes");
    }
}

#[test]
fn long_chunks_have_the_hash_of_the_reference() {
    for bytes in [65_535, 65_536, 65_537, 1 << 20, (1 << 20) + 1023] {
        let data = data(bytes, bytes as u64);
        assert_eq!(of_bytes(&data), xxh3_64(&data), "{bytes} bytes");
    }
}

proptest! {
    #[test]
    fn any_bytes_have_the_hash_of_the_reference(
        data in proptest::collection::vec(any::<u8>(), 0..3000)
    ) {
        prop_assert_eq!(of_bytes(&data), xxh3_64(&data));
    }
}

/// The exchange of values between the lanes of a warp.
struct Exchange {
    values: Mutex<[u64; 32]>,
    step: Barrier,
}

/// A lane that is a thread, with the columns and stripes that it has on a GPU.
struct Threaded<'a> {
    data: &'a [u8],
    lane: u32,
    exchange: &'a Exchange,
}

impl Threaded<'_> {
    fn swap(&self, value: u64, bits: u32) -> u64 {
        self.exchange.values.lock().unwrap()[self.lane as usize] = value;
        self.exchange.step.wait();
        let taken = self.exchange.values.lock().unwrap()[(self.lane ^ bits) as usize];
        self.exchange.step.wait();
        taken
    }
}

impl HashLanes<1, 4> for Threaded<'_> {
    fn place(&self) -> (u32, u32) {
        (self.lane % 8, self.lane / 8)
    }

    fn load(&self, at: u32) -> u64 {
        assert_eq!(at % 8, 0, "a load that is taken for aligned");
        self.load_any(at)
    }

    fn load_any(&self, at: u32) -> u64 {
        u64::from_le_bytes(*self.data[at as usize..].first_chunk().unwrap())
    }

    fn byte(&self, at: u32) -> u64 {
        self.data[at as usize].into()
    }

    fn constant(&self, index: u32) -> u64 {
        CONSTANTS[index as usize]
    }

    fn join(&self, [own]: [u64; 1], [other]: [u64; 1]) -> [u64; 1] {
        let mut sum = own.wrapping_add(self.swap(other, 1));
        sum = sum.wrapping_add(self.swap(sum, 8));
        [sum.wrapping_add(self.swap(sum, 16))]
    }

    fn total(&self, [column]: [u64; 1]) -> u64 {
        let mut sum = fold(column, self.swap(column, 1));
        sum = sum.wrapping_add(self.swap(sum, 2));
        sum.wrapping_add(self.swap(sum, 4))
    }
}

/// Each lane of a warp computes the same hash: where columns, stripes and their exchange go wrong, this
/// does, too.
#[test]
fn lanes_of_a_warp_have_the_hash_of_the_reference() {
    let all = data(5000, 7);
    let mut lengths = vec![0, 1, 3, 4, 8, 9, 16, 17, 64, 128, 129, 200, 240];
    lengths.extend([
        241, 255, 256, 257, 300, 320, 511, 512, 513, 959, 960, 961, 1023,
    ]);
    lengths.extend([
        1024, 1025, 1088, 1089, 2047, 2048, 2049, 3000, 4095, 4096, 4097, 5000,
    ]);
    for bytes in lengths {
        let data = &all[..bytes];
        let exchange = Exchange {
            values: Mutex::default(),
            step: Barrier::new(32),
        };
        let hash_of = |lane| {
            let lanes = Threaded {
                data,
                lane,
                exchange: &exchange,
            };
            of(&lanes, bytes as u32)
        };
        let hashes: Vec<u64> = std::thread::scope(|scope| {
            let hash_of = &hash_of;
            let lanes: Vec<_> = (0..32)
                .map(|lane| scope.spawn(move || hash_of(lane)))
                .collect();
            lanes.into_iter().map(|lane| lane.join().unwrap()).collect()
        });
        assert_eq!(hashes, [xxh3_64(data); 32], "{bytes} bytes");
    }
}
