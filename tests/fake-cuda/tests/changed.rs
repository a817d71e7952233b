//! Drives that change while a GPU has their queues, over the stand-in of CUDA: each case runs in a process of its own.
// UNSAFETY: launches name GPU memory by address.
#![allow(unsafe_code)]

mod stand_in;

use nvme_host::core::spec::Nsid;
use nvme_host::core::spec::admin::{self, FeatureSelect, Format};
use nvme_host::cuda::{DeviceMemory, KernelQueuesOptions, PendingRows, RowRequest, Stream};
use nvme_host::store::GpuOptions;
use nvme_host::{Controller, Error, Store, StoreOptions, Table};
use stand_in::{in_process, is_over_the_stand_in};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const WAIT: Duration = Duration::from_secs(120);
const ROW: u64 = 4096;
const ROWS: u64 = 16;

/// A store whose rows a GPU reads, and memory for them.
struct Rows {
    store: Store,
    stream: Stream,
    out: DeviceMemory,
}

impl Rows {
    fn open(device: &str, nsid: u32) -> Self {
        let options = StoreOptions {
            nsid,
            timeout: Duration::from_secs(60),
            gpu: Some(GpuOptions::default()),
            ..StoreOptions::default()
        };
        Self::with(device, &options)
    }

    fn with(device: &str, options: &StoreOptions) -> Self {
        let store = Store::open(device, options).unwrap();
        assert_eq!(store.path().data, "gpu", "{:?}", store.path());
        let gpu = Arc::clone(store.gpu().unwrap());
        Self {
            stream: Stream::new(&gpu).unwrap(),
            out: DeviceMemory::new(&gpu, (ROWS * ROW) as usize).unwrap(),
            store,
        }
    }

    fn table(&self) -> Table {
        self.store.table(0, ROWS, ROW).unwrap()
    }

    fn controller(&self) -> &Controller {
        self.store.controllers().next().unwrap()
    }

    /// Formats a namespace so that all its facts stay as they are.
    fn format(&self, nsid: Nsid) -> Result<(), Error> {
        let now = self.controller().identify_namespace(nsid).unwrap();
        let format = Format::new(now.flbas & 0xF, 0).command(nsid);
        self.controller().admin("Format NVM", format, 0).map(drop)
    }

    /// A gather of all rows.
    fn gather(&self) -> Result<PendingRows, Error> {
        let request = RowRequest {
            ids: 0,
            wide_ids: true,
            count: ROWS,
            out: self.out.address(),
            out_stride: ROW,
            status: 0,
        };
        // SAFETY: there is room for all rows, which outlives the process's launches.
        unsafe { self.table().gather_on_gpu(&request, self.stream.handle()) }
    }

    /// One that has ended, and whose outcome nobody has asked for.
    fn gathered(&self) -> PendingRows {
        let pending = self.gather().unwrap();
        while !pending.is_done() {
            std::thread::sleep(Duration::from_millis(1));
        }
        pending
    }
}

fn cause(error: Error) -> String {
    match error {
        Error::Changed { cause } => cause,
        other => panic!("{other}"),
    }
}

fn sim(rest: &str) -> String {
    format!("sim:mem?size=4MiB&block=4096&queues=32&threads=2{rest}")
}

macro_rules! cases {
    ($($test:ident $case:ident;)*) => { $(
        #[test]
        fn $test() {
            in_process(stringify!($case));
        }
    )* };
}

cases! {
    a_launch_over_stripes_says_which_member_changed of_stripes;
    a_reset_lets_kernels_go_on_whose_namespace_did_not_change of_another;
    a_poll_waits_for_no_admin_command polled;
    an_erasure_by_this_process_is_known_to_launches erased;
    a_format_of_another_namespace_leaves_launches_alone of_another_by_us;
    a_format_waits_for_kernels_that_have_queues and_kernels_have_queues;
    a_change_is_known_to_launches_of_a_closed_store erased_and_closed;
}

#[test]
fn of_stripes() {
    if !is_over_the_stand_in() {
        return;
    }
    let changing = sim("&fault=format:512@op=write,nth=1");
    let device = format!("stripe:{}|{changing}?stripe=32KiB", sim(""));
    let rows = Rows::open(&device, 1);
    let (waited, polled) = (rows.gathered(), rows.gathered());
    let is_second = rows.store.write_at(32 << 10, &[7; 4096]);
    let said = cause(is_second.unwrap_err());
    assert!(said.contains("member 1"), "{said}");
    for error in [
        waited.wait(WAIT).unwrap_err(),
        polled.outcome().expect("it is known").unwrap_err(),
        rows.gather().map(drop).unwrap_err(),
    ] {
        let said = cause(error);
        assert_eq!(
            said,
            "member 1 of the stripe: namespace 1 was formatted (4096 -> 512 bytes a block)"
        );
    }
}

#[test]
fn of_another() {
    if !is_over_the_stand_in() {
        return;
    }
    // The first write, to whatever namespace, is followed by a format of namespace 1.
    let rows = Rows::open(&sim("&ns=2&fault=format:512@op=write,nth=1"), 2);
    let controller = rows.controller();
    let block_bytes = || controller.usable_namespace(Nsid(1)).unwrap().block_bytes;
    assert_eq!(block_bytes(), 4096);
    rows.store.write_at(0, &[7; 4096]).unwrap();
    controller.reset().unwrap();
    assert_eq!(block_bytes(), 512);
    let ended = rows.gather().unwrap().wait(WAIT).unwrap();
    assert_eq!(ended.failures.rows, 0, "{:?}", ended.failures);
}

#[test]
fn polled() {
    if !is_over_the_stand_in() {
        return;
    }
    // Statuses of writes say that the namespace may have changed, while another thread has the admin queue.
    let faults = "&fault=delay:4s@op=get-features,nth=1&fault=status:0x80@op=write,every=1";
    let rows = Rows::open(&sim(faults), 1);
    let controller = rows.controller();
    let ended: Vec<PendingRows> = (0..60).map(|_| rows.gathered()).collect();
    let (is_over, order) = (AtomicBool::new(false), Ordering::SeqCst);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let sqe = admin::get_features(0x01, FeatureSelect::Current, Nsid::NONE, 0);
            let answer = controller.admin("Get Features", sqe, 4096);
            is_over.store(true, order);
            answer.unwrap();
        });
        scope.spawn(|| {
            while !is_over.load(order) {
                rows.store.write_at(0, &[7; 4096]).unwrap_err();
            }
        });
        let is_met = ended.iter().any(|pending| {
            std::thread::sleep(Duration::from_millis(100));
            // Not known now, and not a moment later.
            let polled = pending.outcome().is_none();
            std::thread::sleep(Duration::from_millis(50));
            let waited = pending.wait(Duration::ZERO);
            let waited = matches!(waited, Err(Error::Unfinished { .. }));
            polled && waited && pending.outcome().is_none() && !is_over.load(order)
        });
        assert!(is_met, "no poll met the command");
    });
    for pending in ended {
        assert_eq!(pending.wait(WAIT).unwrap().failures.rows, 0);
        assert!(pending.outcome().expect("it was known").is_ok());
    }
}

#[test]
fn erased() {
    if !is_over_the_stand_in() {
        return;
    }
    let rows = Rows::open(&sim("&ns=2"), 1);
    let pending = rows.gathered();
    rows.format(Nsid(1)).unwrap();
    for error in [
        pending.wait(WAIT).unwrap_err(),
        pending.outcome().expect("it is known").unwrap_err(),
        rows.gather().map(drop).unwrap_err(),
    ] {
        let said = cause(error);
        assert!(said.starts_with("namespace 1 was formatted"), "{said}");
    }
}

#[test]
fn of_another_by_us() {
    if !is_over_the_stand_in() {
        return;
    }
    // A kernel waits for its first read while the namespace is formatted that it does not use. Were the kernel sent
    // away, its station would be free with the command still in flight.
    let rows = Rows::open(&sim("&ns=2&fault=delay:1500ms@op=read,nth=1"), 2);
    let pending = rows.gather().unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert!(!pending.is_done(), "the read is not withheld");
    rows.format(Nsid(1)).unwrap();
    assert!(!pending.is_done(), "the kernel was sent away");
    let ended = pending.wait(WAIT).unwrap();
    assert_eq!(ended.failures.rows, 0, "{:?}", ended.failures);
}

#[test]
fn and_kernels_have_queues() {
    if !is_over_the_stand_in() {
        return;
    }
    let options = StoreOptions {
        timeout: Duration::from_millis(50),
        gpu: Some(GpuOptions::default()),
        kernel_queues: 1,
        ..StoreOptions::default()
    };
    let rows = Rows::with(&sim("&ns=2"), &options);
    let queues = rows.store.kernel_queues(KernelQueuesOptions {
        queues: 1,
        entries: 16,
        cells: 16,
        buffer_bytes: 0,
    });
    let queues = queues.unwrap();
    queues.begin().unwrap();
    let refused = rows.format(Nsid(1)).unwrap_err();
    assert!(matches!(refused, Error::Usage { .. }), "{refused}");
    // Nothing was erased, so the queues work on, and so do the handles.
    queues.end().unwrap();
    queues.begin().unwrap();
    queues.end().unwrap();
    rows.store.read_at(0, &mut [0; 4096]).unwrap();
    let ended = rows.gather().unwrap().wait(WAIT).unwrap();
    assert_eq!(ended.failures.rows, 0, "{:?}", ended.failures);
    rows.format(Nsid(1)).unwrap();
    cause(queues.begin().unwrap_err());
}

#[test]
fn erased_and_closed() {
    if !is_over_the_stand_in() {
        return;
    }
    let rows = Rows::open(&sim("&ns=2"), 1);
    let (waited, polled) = (rows.gathered(), rows.gathered());
    rows.format(Nsid(1)).unwrap();
    drop(rows);
    for error in [
        waited.wait(WAIT).unwrap_err(),
        polled.outcome().expect("it is known").unwrap_err(),
    ] {
        let said = cause(error);
        assert!(said.starts_with("namespace 1 was formatted"), "{said}");
    }
}
