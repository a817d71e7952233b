//! Relayed doorbells: no ring is lost, and rings arrive in the right order.

use super::*;
use crate::{Controller, ControllerConfig};
use nvme_core::spec::{Lba, Nsid, nvm};

/// Asks the protocol auditor at the end; it has to be dropped after the driver's side.
struct Judge(Arc<nvme_sim::Controller<nvme_sim::HostMemory>>);

impl Drop for Judge {
    fn drop(&mut self) {
        let findings = self.0.findings();
        assert!(
            std::thread::panicking() || findings.is_empty(),
            "{findings:?}"
        );
    }
}

/// Returns a relay to a simulator `sim:mem?` with `options`, a driver, and the auditor's judge.
fn relayed(options: &str, queues: u16) -> (Judge, Arc<DoorbellRelay>, Controller) {
    let (device, controller) =
        crate::device::sim::embed(&format!("mem?{options}&audit=on")).unwrap();
    let judge = Judge(controller);
    let relay = DoorbellRelay::start(device, queues).unwrap();
    let config = ControllerConfig {
        queue_pairs: u32::from(queues),
        ..ControllerConfig::default()
    };
    let device: Arc<dyn Device> = Arc::clone(&relay) as _;
    let controller = Controller::start(device, &config).unwrap();
    (judge, relay, controller)
}

#[test]
fn data_goes_round_through_relayed_doorbells() {
    for dstrd in [0, 3] {
        let (_judge, relay, controller) = relayed(&format!("size=8MiB&dstrd={dstrd}"), 4);
        let data: Vec<u8> = (0..1 << 20).map(|n: u32| ((n * 7) >> 3) as u8).collect();
        let mut namespace = controller.namespace(Nsid(1)).unwrap();
        for start in [0, 17] {
            namespace.write(Lba(start), &data).unwrap();
            let mut read = vec![0; data.len()];
            namespace.read(Lba(start), &mut read).unwrap();
            assert!(read == data);
        }
        let rings = namespace.queue().statistics().rings;
        assert!(relay.forwarded() > 0 && rings > 0);
        drop(namespace);
        controller.shut_down().unwrap();
        let left = |page: &DoorbellPage| page.0.iter().any(|w| w.load(Ordering::Relaxed) != NONE);
        assert!(!relay.words().iter().any(left), "a ring was left behind");
    }
}

#[test]
fn rings_of_io_queues_arrive_before_a_later_ring_of_the_admin_queue() {
    let words: Vec<AtomicU32> = (0..6).map(|_| AtomicU32::new(NONE)).collect();
    words[5].store(7, Ordering::Relaxed);
    let mut rung = Vec::new();
    let passed = pass(
        6,
        |index| &words[index],
        |index, value| {
            rung.push((index, value));
            if index == 5 {
                // Rings the last entry of an I/O queue, then its deletion on the admin queue, when
                // the sweep is already past word 2.
                words[2].store(1, Ordering::Release);
                words[0].store(2, Ordering::Release);
            }
        },
    );
    assert_eq!(rung, [(5, 7), (2, 1), (0, 2)]);
    assert_eq!(passed, 3);
}

#[test]
fn the_last_value_stored_is_never_lost() {
    const ROUNDS: u32 = 20_000;
    let word = AtomicU32::new(NONE);
    let seen = AtomicU32::new(NONE);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                pass(
                    3,
                    |index| if index == 2 { &word } else { &NOTHING },
                    |_, value| {
                        seen.store(value, Ordering::Relaxed);
                    },
                );
            }
        });
        for round in 0..ROUNDS {
            for value in [2 * round, 2 * round + 1] {
                word.store(value, Ordering::Release);
            }
            let begin = Instant::now();
            while seen.load(Ordering::Relaxed) != 2 * round + 1 {
                if begin.elapsed() > Duration::from_secs(20) {
                    stop.store(true, Ordering::Relaxed);
                    panic!("the last value of round {round} was lost");
                }
                std::thread::yield_now();
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// A word that is never rung.
static NOTHING: AtomicU32 = AtomicU32::new(NONE);

/// A queue of the same number rings the same values again; none is taken for an old one, and no
/// ring reaches a queue that is gone.
#[test]
fn queues_come_and_go_with_commands_just_rung() {
    let (_judge, _relay, controller) = relayed("size=1MiB", 2);
    for _ in 0..200 {
        let mut queue = controller.create_queue_pair(4).unwrap();
        let buffer = controller.alloc(4096).unwrap();
        let cid = queue
            .submit(nvm::read(Nsid(1), Lba(0), 1), Some(buffer))
            .unwrap();
        queue.ring();
        assert_eq!(queue.wait().unwrap().unwrap().cid, cid);
        let buffer = controller.alloc(4096).unwrap();
        queue
            .submit(nvm::read(Nsid(1), Lba(1), 1), Some(buffer))
            .unwrap();
        queue.ring();
    }
    assert_eq!(controller.resets(), 0);
    let log = controller.log_page(1, Nsid::ALL, 64).unwrap();
    assert_eq!(log[..8], [0; 8], "the controller found no error");
    controller.shut_down().unwrap();
}

#[test]
fn a_controller_reset_starts_from_silence() {
    let (_judge, _relay, controller) = relayed("size=1MiB", 1);
    let mut queue = controller.create_queue_pair(4).unwrap();
    for round in 0..20 {
        let buffer = controller.alloc(4096).unwrap();
        queue
            .submit(nvm::read(Nsid(1), Lba(0), 1), Some(buffer))
            .unwrap();
        queue.ring();
        let done = queue.wait().unwrap().unwrap();
        assert!(done.is_success(), "round {round}");
        controller.session().reset("a test").unwrap();
    }
}

#[test]
fn as_many_queues_are_relayed_as_have_doorbells() {
    let device = crate::open("sim:mem?size=1MiB&queues=4&dstrd=6").unwrap();
    let known = |map: DoorbellMap| (0..4000).take_while(move |qid| map.pair(Qid(*qid), 6).is_ok());
    let mapped = known(device.doorbells()).count();
    let relay = DoorbellRelay::start(Arc::clone(&device), 4000).unwrap();
    assert!(mapped >= 5);
    assert_eq!(relay.shared.doorbells.len(), 2 * mapped);
    assert_eq!(known(relay.doorbells()).count(), mapped);
    let relay_of_two = DoorbellRelay::start(device, 2).unwrap();
    assert_eq!(
        known(relay_of_two.doorbells()).count(),
        3,
        "no word that is never passed on"
    );
    let words = relay.words().len() * PAGE_WORDS;
    assert!(relay.shared.doorbells.iter().all(|(at, _)| *at < words));
}

#[test]
fn everything_but_doorbells_is_the_device_s_own() {
    let (_judge, relay, controller) = relayed("size=1MiB", 2);
    let own = &relay.shared.device;
    assert_eq!(relay.name(), own.name());
    assert_eq!(
        relay.describe(),
        format!("{}, relayed doorbells", own.describe())
    );
    assert_eq!(relay.guards_data(), own.guards_data());
    assert!(relay.gone().is_none());
    for error in [
        relay.controller_memory().map(drop),
        relay.interrupts(1).map(drop),
    ] {
        assert!(error.is_err());
    }
    controller.shut_down().unwrap();
    relay.reset().unwrap();
    relay.leave();
}
