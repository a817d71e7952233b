//! Throughput of one controller thread, one JSON line for each case.
//!
//! The submission ring is filled and the doorbell stored outside the measured time. The measured
//! part is `step`: fetching, parsing, checking, executing and posting. Reads from memory are
//! compared with a plain memcpy of the same blocks, in the same run.

use nvme_sim::{
    BlockStore, Config, Controller, HostMemory, MemoryStore, NamespaceConfig, NullStore, Runner,
};
use nvme_spec::register::{Cc, offset};
use nvme_spec::{Iova, Lba, Nsid, Qid, Sqe, admin, nvm};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const ENTRIES: u32 = 1024;
const ASQ: u64 = 0;
const ACQ: u64 = 0x1000;
const SQ: u64 = 0x10_0000;
const CQ: u64 = 0x20_0000;
const DATA: u64 = 0x100_0000;
const MEMORY: usize = 32 << 20;

struct Bench {
    controller: Controller<HostMemory>,
    words: Arc<[AtomicU64]>,
    admin_tail: u32,
}

impl Bench {
    fn new(mut config: Config) -> Self {
        config.mqes = ENTRIES;
        let words: Arc<[AtomicU64]> = (0..MEMORY / 8).map(|_| AtomicU64::new(0)).collect();
        let memory = HostMemory::new();
        memory.share(0, words.clone()).unwrap();
        let controller = Controller::new(config, memory).unwrap();
        let mut bench = Self {
            controller,
            words,
            admin_tail: 0,
        };
        bench.controller.write32(offset::AQA, 63 << 16 | 63);
        bench.controller.write64(offset::ASQ, ASQ);
        bench.controller.write64(offset::ACQ, ACQ);
        let mut cc = Cc(0);
        cc.set_iosqes(6);
        cc.set_iocqes(4);
        cc.set_en(true);
        bench.controller.write32(offset::CC, cc.0);
        let queue = |iova| admin::QueueParams {
            qid: Qid(1),
            entries: ENTRIES,
            iova: Iova(iova),
        };
        bench.admin(admin::create_io_cq(queue(CQ), None));
        bench.admin(admin::create_io_sq(queue(SQ), Qid(1)));
        bench
    }

    fn store(&self, iova: u64, sqe: Sqe) {
        for (i, word) in sqe.to_words().into_iter().enumerate() {
            self.words[iova as usize / 8 + i].store(word, Ordering::Relaxed);
        }
    }

    fn admin(&mut self, sqe: Sqe) {
        self.store(ASQ + u64::from(self.admin_tail) * 64, sqe);
        let slot = self.admin_tail;
        self.admin_tail += 1;
        self.controller
            .doorbells()
            .sq_tail(0)
            .store(self.admin_tail, Ordering::Release);
        self.controller.step(0);
        let upper = self.words[(ACQ as usize + slot as usize * 16 + 8) / 8].load(Ordering::Acquire);
        assert_eq!(upper >> 48, 1, "the admin command succeeds");
    }

    /// Runs `sqe(i)` for the i-th entry repeatedly. Returns the number of commands and the time in
    /// `step`.
    fn run(&mut self, sqe: impl Fn(u32) -> Sqe) -> (u64, Duration) {
        for i in 0..ENTRIES {
            self.store(SQ + u64::from(i) * 64, sqe(i));
        }
        let (mut tail, mut commands, mut spent) = (0, 0u64, Duration::ZERO);
        let before = self.controller.queue_stats(1);
        while spent < Duration::from_millis(400) {
            tail = (tail + ENTRIES - 1) % ENTRIES;
            self.controller
                .doorbells()
                .sq_tail(1)
                .store(tail, Ordering::Release);
            let start = Instant::now();
            let stepped = self.controller.step(0);
            spent += start.elapsed();
            commands += u64::from(stepped.commands);
            self.controller
                .doorbells()
                .cq_head(1)
                .store(tail, Ordering::Release);
        }
        let after = self.controller.queue_stats(1);
        assert_eq!(after.commands - before.commands, commands);
        assert_eq!(after.errors, 0);
        // Leaves the ring empty, with both indices at the start of a new run.
        self.reset_to_start(tail);
        (commands, spent)
    }

    fn reset_to_start(&self, tail: u32) {
        if tail != 0 {
            self.controller
                .doorbells()
                .sq_tail(1)
                .store(0, Ordering::Release);
            self.controller.step(0);
            self.controller
                .doorbells()
                .cq_head(1)
                .store(0, Ordering::Release);
            self.controller.step(0);
        }
    }
}

fn config(store: Box<dyn BlockStore + Send + Sync>, dstrd: u8) -> Config {
    let mut config = Config::empty();
    config.dstrd = dstrd;
    config.namespaces.push(NamespaceConfig::new(4096, store));
    config
}

fn main() {
    for dstrd in [0, 4] {
        let mut bench = Bench::new(config(Box::new(NullStore::new(1 << 40)), dstrd));
        let one = |i: u32| {
            let sqe = nvm::read(Nsid(1), Lba(u64::from(i) * 17), 1);
            sqe.with_cid(nvme_spec::Cid(i as u16))
                .with_prps(DATA + u64::from(i) * 4096, 0)
        };
        bench.run(one);
        let (commands, spent) = bench.run(one);
        let ns = spent.as_nanos() as f64 / commands as f64;
        println!(
            "{{\"bench\":\"sim/null\",\"dstrd\":{dstrd},\"commands\":{commands},\
             \"ns_per_command\":{ns:.2},\"commands_per_s\":{:.0}}}",
            1e9 / ns
        );
    }
    for blocks in [1u32, 8] {
        memory(blocks);
    }
    for blocks in [1, 4, 32] {
        write_cache(blocks);
    }
    round_trip();
}

/// Writes of `blocks` blocks to memory, spread over the image, alternately with and without a
/// volatile write cache. The additional time of the cache limits what could be gained at its locks.
fn write_cache(blocks: u32) {
    const IMAGE: u64 = 256 << 20;
    let mut benches = [true, false].map(|write_cache| {
        let mut config = config(Box::new(MemoryStore::new(IMAGE).unwrap()), 0);
        config.write_cache = write_cache;
        // Fewer bytes than one ring of commands writes, so each write keeps its block's old
        // content.
        config.cache_bytes = 1 << 20;
        Bench::new(config)
    });
    let bytes = u64::from(blocks) * 4096;
    let mut best = [f64::INFINITY; 2];
    // The first round touches the pages of the images.
    for turn in 0..6 {
        for (bench, best) in benches.iter_mut().zip(&mut best) {
            let sqe = |words: &[AtomicU64], i: u32| {
                let (i, list) = (u64::from(i), CQ + 0x8_0000 + u64::from(i) * 256);
                let data = DATA + i % 64 * (128 << 10);
                for page in 1..u64::from(blocks) {
                    bench_list(words, list + (page - 1) * 8, data + page * 4096);
                }
                // The factor is odd, so every position is written once before the first one is
                // written again.
                let lba = i * 2_654_435_761 * u64::from(blocks) % (IMAGE / 4096);
                let second = if blocks == 1 { 0 } else { list };
                nvm::write(Nsid(1), Lba(lba), blocks).with_prps(data, second)
            };
            let sqes: Vec<Sqe> = (0..ENTRIES).map(|i| sqe(&bench.words, i)).collect();
            let (commands, spent) = bench.run(|i| sqes[i as usize]);
            if turn != 0 {
                *best = best.min(spent.as_nanos() as f64 / commands as f64);
            }
        }
    }
    let [on, off] = best;
    println!(
        "{{\"bench\":\"sim/write-cache\",\"bytes\":{bytes},\"wc_on_ns\":{on:.0},\"wc_off_ns\":{off:.0},\
         \"wc_on_of_wc_off\":{:.2}}}",
        off / on
    );
}

/// One command at a time against a runner thread: the latency that a driver on another core sees.
fn round_trip() {
    const ROUNDS: u64 = 200_000;
    let bench = Bench::new(config(Box::new(NullStore::new(1 << 40)), 0));
    let Bench {
        controller, words, ..
    } = bench;
    let controller = Arc::new(controller);
    let runner = Runner::start(controller.clone(), 1);
    let sqe = nvm::read(Nsid(1), Lba(0), 1).with_prps(DATA, 0).to_words();
    let start = Instant::now();
    for round in 0..ROUNDS {
        let index = (round % u64::from(ENTRIES)) as usize;
        for (i, word) in sqe.iter().enumerate() {
            words[SQ as usize / 8 + index * 8 + i].store(*word, Ordering::Relaxed);
        }
        let next = (index as u32 + 1) % ENTRIES;
        controller
            .doorbells()
            .sq_tail(1)
            .store(next, Ordering::Release);
        let phase = 1 - round / u64::from(ENTRIES) % 2;
        let upper = &words[CQ as usize / 8 + index * 2 + 1];
        while upper.load(Ordering::Acquire) >> 48 & 1 != phase {
            std::hint::spin_loop();
        }
        controller
            .doorbells()
            .cq_head(1)
            .store(next, Ordering::Release);
    }
    let ns = start.elapsed().as_nanos() as f64 / ROUNDS as f64;
    runner.stop();
    println!(
        "{{\"bench\":\"sim/runner-qd1\",\"round_trips\":{ROUNDS},\"ns_per_round_trip\":{ns:.0}}}"
    );
}

/// Reads of `blocks` blocks of 4 KiB from memory, against memcpy of the same blocks.
fn memory(blocks: u32) {
    const IMAGE: u64 = 256 << 20;
    let image = vec![7u8; IMAGE as usize];
    let store = MemoryStore::new(IMAGE).unwrap();
    store.write_at(0, &image).unwrap();
    let mut bench = Bench::new(config(Box::new(store), 0));
    let bytes = blocks as usize * 4096;
    let buffers = (8 << 20) / bytes as u64;
    // Scattered over the image, so that neither side works from the processor's cache alone.
    let lba = |i: u64| i * 7919 * u64::from(blocks) % (IMAGE / 4096 - u64::from(blocks));
    let buffer = |i: u64| DATA + i % buffers * bytes as u64;
    let sqe = |i: u32| {
        let i = u64::from(i);
        let list = CQ + 0x8_0000 + i % 1024 * 64;
        for page in 1..u64::from(blocks) {
            let entry = buffer(i) + page * 4096;
            bench_list(&bench.words, list + (page - 1) * 8, entry);
        }
        let prp2 = if blocks > 2 { list } else { 0 };
        nvm::read(Nsid(1), Lba(lba(i)), blocks).with_prps(buffer(i), prp2)
    };
    let sqes: Vec<Sqe> = (0..ENTRIES).map(sqe).collect();
    bench.run(|i| sqes[i as usize]);
    let mut target = vec![0u8; 8 << 20];
    let (mut read, mut copy) = (f64::INFINITY, f64::INFINITY);
    // The two sides alternate, and the best of each counts, because the machine is shared.
    for _ in 0..3 {
        let (commands, spent) = bench.run(|i| sqes[i as usize]);
        read = read.min(spent.as_nanos() as f64 / commands as f64);
        let start = Instant::now();
        let mut copies = 0u64;
        while start.elapsed() < Duration::from_millis(400) {
            for i in 0..u64::from(ENTRIES) {
                let from = lba(i) as usize * 4096;
                let to = (i % buffers) as usize * bytes;
                target[to..to + bytes].copy_from_slice(&image[from..from + bytes]);
            }
            std::hint::black_box(&mut target);
            copies += u64::from(ENTRIES);
        }
        copy = copy.min(start.elapsed().as_nanos() as f64 / copies as f64);
    }
    println!(
        "{{\"bench\":\"sim/memory-read\",\"bytes\":{bytes},\"ns_per_command\":{read:.1},\
         \"gb_per_s\":{:.2},\"memcpy_gb_per_s\":{:.2},\"of_memcpy\":{:.2}}}",
        bytes as f64 / read,
        bytes as f64 / copy,
        copy / read
    );
}

fn bench_list(words: &[AtomicU64], at: u64, entry: u64) {
    words[at as usize / 8].store(entry, Ordering::Relaxed);
}
