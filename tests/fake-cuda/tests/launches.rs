//! Operations of several launches or chunks, stripes of unlike drives, and recoveries below kernels, over the stand-in
//! of CUDA: each case runs in a process of its own.
// UNSAFETY: launches name GPU memory by address.
#![allow(unsafe_code)]

mod stand_in;

use nvme_host::core::spec::{Lba, Nsid, nvm};
use nvme_host::cuda::{
    CudaGraph, DeviceMemory, LaunchSequence, PendingRows, ReadRange, RowFailures, RowRequest,
    Stream,
};
use nvme_host::store::GpuOptions;
use nvme_host::{Result, Store, StoreOptions, Table};
use stand_in::{in_process, is_over_the_stand_in};
use std::time::Duration;

const WAIT: Duration = Duration::from_secs(120);
/// Row codes of the kernels.
const OUT_OF_RANGE: i32 = -1;
const GONE: i32 = -3;
/// A status that no drive of this file has by itself.
const READ_ERROR: i32 = 0x281;

/// A store whose rows a GPU moves, and memory for rows, ids and their status.
struct GpuFixture {
    store: Store,
    stream: Stream,
    rows: DeviceMemory,
    ids: DeviceMemory,
    status: DeviceMemory,
}

impl GpuFixture {
    fn open(device: &str, bytes: u64) -> Self {
        let options = StoreOptions {
            timeout: Duration::from_secs(60),
            gpu: Some(GpuOptions::default()),
            ..StoreOptions::default()
        };
        let store = Store::open(device, &options).unwrap();
        let gpu = store.gpu().unwrap();
        let memory = |bytes: u64| DeviceMemory::new(gpu, bytes as usize).unwrap();
        Self {
            stream: Stream::new(gpu).unwrap(),
            rows: memory(bytes),
            ids: memory(64 << 10),
            status: memory(32 << 10),
            store,
        }
    }

    /// Returns a request for the rows with `ids`, each of `row_bytes` bytes.
    fn request(&self, ids: &[i64], row_bytes: u64) -> RowRequest {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        self.ids.upload(0, &bytes).unwrap();
        self.status.upload(0, &vec![0xA5; ids.len() * 4]).unwrap();
        RowRequest {
            ids: self.ids.address(),
            wide_ids: true,
            count: ids.len() as u64,
            out: self.rows.address(),
            out_stride: row_bytes,
            status: self.status.address(),
        }
    }

    fn start(&self, table: &Table, request: &RowRequest) -> Result<PendingRows> {
        // SAFETY: there is room for the request, which outlives the process's launches.
        unsafe { table.gather_on_gpu(request, self.stream.handle()) }
    }

    /// Gathers the rows with `ids`; returns their bytes, row statuses and failures.
    fn gather(&self, table: &Table, ids: &[i64]) -> (Vec<u8>, Vec<i32>, RowFailures) {
        let request = self.request(ids, table.row_bytes());
        let ended = self.start(table, &request).unwrap().wait(WAIT).unwrap();
        let mut rows = vec![0; ids.len() * table.row_bytes() as usize];
        self.rows.download(0, &mut rows).unwrap();
        (rows, self.row_status(ids.len()), ended.failures)
    }

    fn row_status(&self, count: usize) -> Vec<i32> {
        let mut bytes = vec![0; count * 4];
        self.status.download(0, &mut bytes).unwrap();
        let words = bytes.as_chunks::<4>().0.iter();
        words.map(|word| i32::from_le_bytes(*word)).collect()
    }
}

fn sim(rest: &str) -> String {
    format!("sim:mem?size=4MiB&block=4096&queues=32&threads=2{rest}")
}

/// A function of the library that the process has as the driver's.
fn of_driver(name: &std::ffi::CStr) -> *mut std::ffi::c_void {
    // SAFETY: both names are terminated; the library stays loaded.
    let function = unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
        libc::dlsym(library, name.as_ptr())
    };
    assert!(!function.is_null(), "{name:?}");
    function
}

/// How many bytes of the GPU are not allocated.
fn free_bytes() -> usize {
    type Info = unsafe extern "C" fn(*mut usize, *mut usize) -> i32;
    let (mut free, mut total) = (0, 0);
    // SAFETY: the driver's function, which writes two numbers.
    let status = unsafe {
        let info =
            std::mem::transmute::<*mut std::ffi::c_void, Info>(of_driver(c"cuMemGetInfo_v2"));
        info(&mut free, &mut total)
    };
    assert_eq!(status, 0);
    free
}

/// From now on the driver takes `count` launches and refuses the next one; -1 ends that.
fn refuse_after(count: i64) {
    type Refuse = extern "C" fn(i64);
    // SAFETY: a function of the stand-in with this parameter.
    let refuse = unsafe {
        std::mem::transmute::<*mut std::ffi::c_void, Refuse>(of_driver(c"fake_cuda_refuse_after"))
    };
    refuse(count);
}

/// Waits until as much memory of the GPU is free as `before`; each gather takes back what was left.
fn comes_back(fixture: &GpuFixture, table: &Table, before: usize) {
    let begin = std::time::Instant::now();
    while free_bytes() < before {
        assert!(begin.elapsed() < WAIT, "{} of {before}", free_bytes());
        // Also the numbers of launches come back by and by.
        if let Ok(pending) = fixture.start(table, &fixture.request(&[1], 4096)) {
            pending.wait(WAIT).unwrap();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The kernel of a gather that has begun still uses the lines of its table's cache.
#[test]
fn a_cache_outlives_its_table_under_a_launch_and_no_longer() {
    if !is_over_the_stand_in() {
        return in_process("a_cache_outlives_its_table_under_a_launch_and_no_longer");
    }
    let fixture = GpuFixture::open(&sim("&fault=delay:2s@op=read,nth=2"), 1 << 20);
    let table = fixture.store.table(0, 16, 4096).unwrap();
    fixture.gather(&table, &[1]);
    let before = free_bytes();
    let cached = fixture.store.table(0, 16, 4096).unwrap();
    let cached = cached.cached(1 << 20).unwrap();
    let with_cache = free_bytes();
    assert!(with_cache < before);
    let pending = fixture
        .start(&cached, &fixture.request(&[5], 4096))
        .unwrap();
    drop(cached);
    let now = free_bytes();
    // Memory that an ended launch had may be free: only one that has not says what is kept.
    if !pending.is_done() {
        assert_eq!(now, with_cache, "freed under its launch");
    }
    assert_eq!(pending.wait(WAIT).unwrap().failures.rows, 0);
    drop(pending);
    comes_back(&fixture, &table, before);
}

/// More of them than a store has launches, which are 4,096.
#[test]
fn captures_that_fail_leave_nothing() {
    if !is_over_the_stand_in() {
        return in_process("captures_that_fail_leave_nothing");
    }
    let fixture = GpuFixture::open(&sim(""), 1 << 20);
    let table = fixture.store.table(0, 16, 4096).unwrap();
    fixture.gather(&table, &[1]);
    let before = free_bytes();
    for _ in 0..4200 {
        let cached = fixture.store.table(0, 16, 4096).unwrap();
        let cached = cached.cached(1 << 17).unwrap();
        let request = fixture.request(&[5], 4096);
        refuse_after(0);
        let captured = CudaGraph::capture(&fixture.stream, |_| fixture.start(&cached, &request));
        refuse_after(-1);
        assert!(captured.is_err());
    }
    comes_back(&fixture, &table, before);
    let begin = std::time::Instant::now();
    while fixture.start(&table, &fixture.request(&[3], 4096)).is_err() {
        assert!(begin.elapsed() < WAIT, "no launch is free");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// 100 ranges of one command each are two launches, of 96 and of 4.
#[test]
fn the_first_failure_of_several_launches_is_told_with_its_place() {
    if !is_over_the_stand_in() {
        return in_process("the_first_failure_of_several_launches_is_told_with_its_place");
    }
    const FIRST_LAUNCH: u64 = 96;
    for (failing, rows) in [("97-100", 4), ("96-100", 5), ("1-100", 100)] {
        let fault = format!("&fault=status:{READ_ERROR:#x}@op=read,nth={failing}");
        let fixture = GpuFixture::open(&sim(&fault), 1 << 20);
        let range = |index: u64| ReadRange {
            offset: index * 8192,
            bytes: 4096,
            to: fixture.rows.address() + index * 4096,
        };
        let ranges: Vec<ReadRange> = (0..100).map(range).collect();
        // SAFETY: there is room for the ranges, which outlives the process's launches.
        let pending = unsafe {
            fixture
                .store
                .read_ranges_on_gpu(&ranges, fixture.stream.handle())
        };
        let failures = pending.unwrap().wait(WAIT).unwrap().failures;
        let (first, code) = failures.first.unwrap();
        assert_eq!((failures.rows, code), (rows, READ_ERROR), "{failing}");
        match rows {
            4 => assert_eq!(first, FIRST_LAUNCH),
            // The last command of the first launch is that of any of its ranges.
            5 => assert!(first < FIRST_LAUNCH, "{first}"),
            _ => assert_eq!(first, 0),
        }
    }
}

/// What comes last in the operation is a launch whose end the operation is not told, and then one without rows.
#[test]
fn an_operation_ends_with_a_launch_that_tells_nothing_of_its_end() {
    if !is_over_the_stand_in() {
        return in_process("an_operation_ends_with_a_launch_that_tells_nothing_of_its_end");
    }
    let fixture = GpuFixture::open(&sim("&fault=delay:300ms@op=read,every=2"), 1 << 20);
    let table = fixture.store.table(0, 16, 4096).unwrap();
    let request = fixture.request(&[5], 4096);
    for is_followed in [false, true] {
        let mut silent = None;
        let gpu = fixture.store.gpu().unwrap();
        let pending = LaunchSequence::run(gpu, fixture.stream.handle(), |sequence| {
            sequence.add(fixture.start(&table, &request)?, 0);
            sequence.kernel(|| {
                silent = Some(fixture.start(&table, &request)?);
                Ok(())
            })?;
            if is_followed {
                sequence.add(PendingRows::nothing(), 1);
            }
            Ok(())
        });
        assert_eq!(pending.unwrap().wait(WAIT).unwrap().failures.rows, 0);
        assert!(silent.unwrap().is_done());
    }
}

/// A host thread stages 16 MiB of rows at a time: each row of 9 MiB is a chunk.
#[test]
fn rows_of_later_chunks_have_their_own_places() {
    if !is_over_the_stand_in() {
        return in_process("rows_of_later_chunks_have_their_own_places");
    }
    const ROW: u64 = 9 << 20;
    let file = std::env::temp_dir().join(format!("nvme-gpu-chunks-{}", std::process::id()));
    std::fs::File::create(&file)
        .unwrap()
        .set_len(3 * ROW)
        .unwrap();
    let fixture = GpuFixture::open(&format!("file:{}", file.display()), 3 * ROW);
    std::fs::remove_file(&file).unwrap();
    fixture.store.write_at(2 * ROW, &[7; 64]).unwrap();
    let table = fixture.store.table(0, 3, ROW).unwrap();
    let (rows, status, failures) = fixture.gather(&table, &[0, 3, 2]);
    assert_eq!(status, [0, OUT_OF_RANGE, 0]);
    assert_eq!(
        (failures.rows, failures.first),
        (1, Some((1, OUT_OF_RANGE)))
    );
    assert_eq!(rows[2 * ROW as usize..][..64], [7; 64]);
}

/// A write that the store does not know of stands for one whose end was lost: it may have taken place until the reset.
#[test]
fn a_cache_forgets_its_rows_with_a_recovery() {
    if !is_over_the_stand_in() {
        return in_process("a_cache_forgets_its_rows_with_a_recovery");
    }
    let fixture = GpuFixture::open(&sim(""), 1 << 20);
    let table = fixture
        .store
        .table(0, 16, 4096)
        .unwrap()
        .cached(1 << 20)
        .unwrap();
    let first = |byte: u8| {
        let (rows, _, failures) = fixture.gather(&table, &[5]);
        assert_eq!(failures.rows, 0);
        assert_eq!(rows[..4], [byte; 4]);
    };
    fixture.store.write_at(5 * 4096, &[1; 4096]).unwrap();
    first(1);
    let controller = fixture.store.controllers().next().unwrap();
    let mut queue = controller.create_queue_pair(16).unwrap();
    let mut buffer = controller.alloc(4096).unwrap();
    buffer.as_mut_slice().fill(2);
    queue
        .submit(nvm::write(Nsid(1), Lba(5), 1), Some(buffer))
        .unwrap();
    queue.ring();
    assert!(queue.wait().unwrap().unwrap().is_success());
    controller.reset().unwrap();
    first(2);
}

/// No event tells that another drive answers; the reset finds it. A graph asks no thread of the host before it runs.
#[test]
fn a_recovery_that_finds_another_drive_lets_no_kernel_in() {
    if !is_over_the_stand_in() {
        return in_process("a_recovery_that_finds_another_drive_lets_no_kernel_in");
    }
    for _ in 0..4 {
        let fixture = GpuFixture::open(&sim("&fault=replace@op=write,nth=1"), 1 << 20);
        let table = fixture.store.table(0, 16, 4096).unwrap();
        let request = fixture.request(&[0, 5], 4096);
        let captured = CudaGraph::capture(&fixture.stream, |_| fixture.start(&table, &request));
        let (graph, pending) = captured.unwrap();
        let run = |times| {
            graph.launch(&fixture.stream).unwrap();
            fixture.stream.finish().unwrap();
            assert_eq!(pending.ended(), times);
            fixture.row_status(2)
        };
        assert_eq!(run(1), [0, 0]);
        fixture.store.write_at(0, &[7; 4096]).unwrap();
        fixture.store.controllers().next().unwrap().reset().unwrap();
        assert_eq!(run(2), [GONE, GONE]);
    }
}

/// Blocks and the largest transfer (MDTS) of the second member are other ones than those of the first.
#[test]
fn a_stripe_goes_by_the_least_of_its_members() {
    if !is_over_the_stand_in() {
        return in_process("a_stripe_goes_by_the_least_of_its_members");
    }
    let member =
        |block, mdts| format!("sim:mem?size=1MiB&block={block}&mdts={mdts}&queues=32&threads=2");
    let device = format!("stripe:{}|{}?stripe=64KiB", member(512, 5), member(4096, 1));
    let fixture = GpuFixture::open(&device, 1 << 20);
    let image: Vec<u8> = (0..256u32 << 10)
        .flat_map(|word| (word * 7).to_le_bytes())
        .collect();
    fixture.store.write_at(0, &image).unwrap();
    for row_bytes in [512, 4096] {
        let table = fixture
            .store
            .table(0, (1 << 20) / row_bytes, row_bytes)
            .unwrap();
        // Neighbours, which may share a command, also on the second member.
        let ids: Vec<i64> = (0..(192 << 10) / row_bytes as i64).collect();
        let (rows, _, failures) = fixture.gather(&table, &ids);
        assert_eq!((failures.rows, failures.first), (0, None), "{row_bytes}");
        assert!(rows == image[..rows.len()], "rows of {row_bytes} bytes");
    }
}

/// Who has read rows ahead asks the mark whether they are still those of the store.
#[test]
fn each_run_of_a_captured_scatter_changes_the_write_mark() {
    if !is_over_the_stand_in() {
        return in_process("each_run_of_a_captured_scatter_changes_the_write_mark");
    }
    let fixture = GpuFixture::open(&sim(""), 1 << 20);
    let table = fixture.store.table(0, 16, 4096).unwrap();
    let request = fixture.request(&[3, 4], 4096);
    let captured = CudaGraph::capture(&fixture.stream, |stream| {
        // SAFETY: there is room for the request, which outlives the process's launches.
        unsafe { table.scatter_on_gpu(&request, stream) }
    });
    let (graph, pending) = captured.unwrap();
    for times in 1..=2 {
        let before = fixture.store.write_mark();
        assert_eq!(fixture.store.write_mark(), before, "nothing was written");
        graph.launch(&fixture.stream).unwrap();
        fixture.stream.finish().unwrap();
        assert_eq!((pending.ended(), pending.last().failures.rows), (times, 0));
        assert_ne!(fixture.store.write_mark(), before);
    }
}
