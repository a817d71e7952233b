//! The controller through the socket: a small driver whose memory is shared with it.

use super::*;
use crate::config::settings::NamespaceConfig;
use crate::event::EventFd;
use crate::medium::store::NullStore;
use crate::vfio_user::wire::{irq, region};
use nvme_spec::register::{Cc, Csts, offset};
use nvme_spec::{Cid, Nsid, Sqe, admin};
use std::boxed::Box;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

/// Address of the driver's memory for the controller.
pub const BASE: u64 = 0x10_0000;
/// Length of that memory: submission queue, completion queue, data.
pub const BYTES: u64 = 128 << 10;
const ENTRIES: u32 = 16;
const CQ: u64 = 0x1000;
const DATA: u64 = 0x4000;

pub fn identify() -> Sqe {
    identify_to(0)
}

/// Returns an Identify into a page of the data.
fn identify_to(page: u64) -> Sqe {
    let sqe = admin::identify(admin::cns::CONTROLLER, Nsid::NONE);
    sqe.with_prps(BASE + DATA + page * 4096, 0)
}

/// The driver's side of the admin queue, in shared memory and with mapped doorbells.
pub struct Guest {
    memory: Arc<crate::memory::GuestMemory>,
    bells: crate::memory::GuestMemory,
    submitted: u32,
}

impl Guest {
    /// Maps memory and doorbells.
    pub fn new(client: &mut Client) -> Self {
        let fd = memfd(BYTES);
        client.map(BASE, BYTES, Some(&fd)).expect("mapped");
        let memory = crate::memory::GuestMemory::map(fd.as_fd(), 0, BYTES, true).unwrap();
        let info = wire::RegionInfo {
            argsz: 64,
            flags: 0,
            index: region::BAR0,
            cap_offset: 0,
            size: 0,
            offset: 0,
        };
        let (_, fds) = client
            .send(command::DEVICE_GET_REGION_INFO, info.as_bytes(), &[])
            .unwrap();
        let bells = crate::memory::GuestMemory::map(fds[0].as_fd(), 0x1000, 4096, true).unwrap();
        Self {
            memory: Arc::new(memory),
            bells,
            submitted: 0,
        }
    }

    /// Enables the controller with the admin queue at the start of the memory.
    pub fn enable(&mut self, client: &mut Client) {
        client.write32(offset::AQA, (ENTRIES - 1) << 16 | (ENTRIES - 1));
        client
            .write(0, offset::ASQ.into(), &BASE.to_le_bytes())
            .unwrap();
        client
            .write(0, offset::ACQ.into(), &(BASE + CQ).to_le_bytes())
            .unwrap();
        let mut cc = Cc(0);
        cc.set_iosqes(6);
        cc.set_iocqes(4);
        cc.set_en(true);
        client.write32(offset::CC, cc.0);
        assert!(Csts(client.read32(0, offset::CSTS.into())).rdy());
        self.submitted = 0;
    }

    pub fn word(&self, at: u64) -> &AtomicU64 {
        self.memory.span().word(at as usize).unwrap()
    }

    fn bell(&self, at: usize, value: u32) {
        let word = self.bells.span().word(at & !7).unwrap();
        let shift = (at & 4) * 8;
        let mask = u64::from(u32::MAX) << shift;
        let old = word.load(Ordering::Relaxed);
        word.store(old & !mask | u64::from(value) << shift, Ordering::Release);
    }

    /// Places a command; its CID counts up from 0.
    pub fn place(&mut self, sqe: Sqe) -> u32 {
        let at = u64::from(self.submitted % ENTRIES) * 64;
        let words = sqe.with_cid(Cid(self.submitted as u16)).to_words();
        for (i, word) in (0..).zip(words) {
            self.word(at + i * 8).store(word, Ordering::Relaxed);
        }
        self.submitted += 1;
        self.submitted % ENTRIES
    }

    /// Places a command and rings through the mapping.
    pub fn submit(&mut self, sqe: Sqe) {
        let tail = self.place(sqe);
        self.bell(0, tail);
    }

    /// Waits for the `nth` completion since the controller was enabled, and returns its status.
    pub fn wait(&self, nth: u32) -> u16 {
        let index = u64::from((nth - 1) % ENTRIES);
        let phase = u64::from(1 - (nth - 1) / ENTRIES % 2);
        let word = self.word(CQ + index * 16 + 8);
        let started = Instant::now();
        loop {
            let upper = word.load(Ordering::Acquire);
            if upper >> 48 & 1 == phase {
                assert_eq!(upper >> 32 & 0xFFFF, u64::from(nth - 1), "CID");
                return (upper >> 49) as u16;
            }
            assert!(started.elapsed() < Duration::from_secs(20), "no completion");
            std::thread::yield_now();
        }
    }

    /// Frees the first `nth` completions.
    pub fn consume(&self, nth: u32) {
        self.bell(4, nth % ENTRIES);
    }
}

/// Returns the vendor in the Identify data.
fn vendor(guest: &Guest) -> u16 {
    guest.word(DATA).load(Ordering::Relaxed) as u16
}

#[test]
fn commands_run_through_shared_memory_and_end_with_an_interrupt() {
    let mut client = ServeOutcome::simple().hold_client();
    let mut guest = Guest::new(&mut client);
    let event = EventFd::new().unwrap();
    let set = wire::IrqSet {
        argsz: 20,
        flags: wire::SET_DATA_EVENTFD | wire::SET_TRIGGER,
        index: irq::MSIX,
        start: 0,
        count: 1,
    };
    let armed = client.send(command::DEVICE_SET_IRQS, set.as_bytes(), &[event.fd()]);
    assert!(armed.is_ok());
    guest.enable(&mut client);
    for nth in 1..40 {
        guest.submit(identify());
        assert!(event.wait(Duration::from_secs(20)), "interrupt {nth}");
        event.clear();
        assert_eq!(guest.wait(nth), 0);
        guest.consume(nth);
    }
    assert_eq!(vendor(&guest), crate::command::identify::PCI_VENDOR);
}

#[test]
fn trapped_doorbells_wake_a_controller_that_sleeps() {
    let mut client = ServeOutcome::simple().hold_client();
    let mut guest = Guest::new(&mut client);
    guest.enable(&mut client);
    for nth in 1..5 {
        let tail = guest.place(identify());
        client.write32(offset::DOORBELLS, tail);
        assert_eq!(guest.wait(nth), 0);
        client.write32(offset::DOORBELLS + 4, tail);
    }
}

#[test]
fn every_kind_of_reset_stops_the_controller_and_it_can_be_enabled_again() {
    let mut client = ServeOutcome::simple().hold_client();
    let mut guest = Guest::new(&mut client);
    // By CC, by message, and by the PCI Express capability.
    for how in 0..4 {
        guest.enable(&mut client);
        guest.submit(identify());
        assert_eq!(guest.wait(1), 0);
        match how {
            0 => client.write32(offset::CC, 0),
            1 => drop(client.send(command::DEVICE_RESET, &[], &[]).unwrap()),
            2 => client.write(7, 0x69, &[0x80]).unwrap(),
            _ => client.unmap(wire::UNMAP_ALL, 0, 0).unwrap(),
        }
        if how == 3 {
            break;
        }
        assert_eq!(client.read32(0, offset::CSTS.into()), 0, "{how}");
        assert_eq!(client.read32(0, offset::ASQ.into()) == 0, how != 0);
        for at in (0..256).step_by(8) {
            guest.word(CQ + at).store(0, Ordering::Relaxed);
        }
    }
    // The controller cannot reach the queues now: a fatal status is the only effect.
    guest.submit(identify());
    let started = Instant::now();
    while !Csts(client.read32(0, offset::CSTS.into())).cfs() {
        assert!(
            started.elapsed() < Duration::from_secs(20),
            "no fatal status"
        );
    }
}

#[test]
fn a_controller_that_left_the_bus_reads_as_ones_until_the_next_client() {
    let mut config = config();
    let when = crate::config::fault::FaultCondition {
        qid: Some(0),
        nth: Some(1),
        ..crate::config::fault::FaultCondition::default()
    };
    let what = crate::config::fault::Fault::AllOnes;
    config
        .faults
        .rules
        .push(crate::config::fault::FaultRule { when, what });
    let served = ServeOutcome::new(config, 1);
    let mut client = served.client();
    let mut guest = Guest::new(&mut client);
    guest.enable(&mut client);
    guest.submit(identify());
    let started = Instant::now();
    while client.read32(0, offset::CSTS.into()) != u32::MAX {
        assert!(started.elapsed() < Duration::from_secs(20), "still there");
    }
    client.send(command::DEVICE_RESET, &[], &[]).unwrap();
    assert_eq!(client.read(0, 0, 8), Ok(vec![0xFF; 8]));
    drop(client);
    let mut client = served.client();
    assert_eq!(client.read32(0, offset::CSTS.into()), 0);
    Guest::new(&mut client).enable(&mut client);
}

#[test]
fn memory_goes_away_while_commands_use_it() {
    let mut config = config();
    let null = NullStore::new(1 << 30);
    config.namespaces = vec![NamespaceConfig::new(512, Box::new(null))];
    let mut client = ServeOutcome::new(config, 2).hold_client();
    for _ in 0..20 {
        let mut guest = Guest::new(&mut client);
        guest.enable(&mut client);
        for page in 1..ENTRIES {
            guest.submit(identify_to(page.into()));
        }
        client.unmap(0, BASE, BYTES).unwrap();
        let words = || (0..BYTES / 8).map(|i| guest.word(i * 8).load(Ordering::Relaxed));
        let before: Vec<u64> = words().collect();
        std::thread::yield_now();
        assert!(words().eq(before), "nothing is written after the reply");
        client.write32(offset::CC, 0);
    }
}

#[test]
fn a_client_that_shortens_its_memory_is_put_out_and_the_server_lives() {
    let served = ServeOutcome::simple();
    let mut client = served.client();
    let fd = memfd(BYTES);
    client.map(BASE, BYTES, Some(&fd)).unwrap();
    let mut guest = Guest {
        memory: Arc::new(crate::memory::GuestMemory::map(fd.as_fd(), 0, BYTES, true).unwrap()),
        bells: crate::memory::GuestMemory::map(memfd(4096).as_fd(), 0, 4096, true).unwrap(),
        submitted: 0,
    };
    guest.enable(&mut client);
    ftruncate(&fd, 0).unwrap();
    client.write32(offset::DOORBELLS, 1);
    let started = Instant::now();
    let tick = Some(Duration::from_millis(1));
    client.socket.set_read_timeout(tick).unwrap();
    let question = MessageHeader {
        id: 0,
        command: command::DEVICE_GET_INFO,
        size: size_of::<MessageHeader>() as u32,
        flags: wire::NO_REPLY,
        error: 0,
    };
    let mut client = loop {
        // The controller notices at its next look, the server at the next message. Sending a message that the server
        // does not read any more, or reading here, is then an error.
        let asked = [(); 2].map(|()| client.try_put(question, &[], &[]).is_ok());
        let read = client.socket.read(&mut [0]).map_err(|error| error.kind());
        if !asked[1] || !matches!(read, Err(ErrorKind::WouldBlock | ErrorKind::Interrupted)) {
            break served.client();
        }
        assert!(
            started.elapsed() < Duration::from_secs(20),
            "still connected"
        );
    };
    assert!(client.read(0, 0, 8).is_ok());
}

/// A client that leaves is a function level reset, a Controller Level Reset: saved features, the error log
/// and a sanitize operation outlive it, current features do not.
///
/// NVMe Base 2.0c, "Controller Level Reset" and "Feature Values"; 5.16.1.2 (Error Information).
#[test]
fn the_next_client_finds_what_a_reset_keeps() {
    use nvme_spec::feature::{SAVE, fid};
    use nvme_spec::log_page::{lid, sanitize_state};
    let mut config = config();
    config.sanitize_ns = 60_000_000_000;
    let served = ServeOutcome::new(config, 1);
    let set = |id, value, save| {
        let mut sqe = admin::set_features(id, Nsid::NONE, value);
        sqe.cdw10 |= if save { SAVE } else { 0 };
        sqe
    };
    let get = |id| admin::get_features(id, admin::FeatureSelect::Current, Nsid::NONE, 0);
    let log = |lid| admin::get_log_page(lid, Nsid::ALL, 512, 0).with_prps(BASE + DATA, 0);
    let erase = admin::SanitizeFields::new(admin::SanitizeAction::BlockErase);
    let erase = admin::sanitize(erase);
    let mut refused = identify();
    refused.cdw0 |= 1 << 8; // Fused: an error that the log has.

    let mut client = served.client();
    let mut guest = Guest::new(&mut client);
    guest.enable(&mut client);
    let first = [
        (set(fid::ARBITRATION, 0x0102_0304, true), 0),
        (set(fid::ERROR_RECOVERY, 77, false), 0),
        (refused, 0x4002),
        (erase, 0),
    ];
    for (nth, (sqe, status)) in (1..).zip(first) {
        guest.submit(sqe);
        assert_eq!(guest.wait(nth), status, "{nth}");
    }
    drop((guest, client));

    let mut client = served.client();
    let mut guest = Guest::new(&mut client);
    guest.enable(&mut client);
    let dword0 = |guest: &Guest, nth: u64| {
        let lower = guest.word(CQ + (nth - 1) * 16).load(Ordering::Acquire);
        lower as u32
    };
    guest.submit(get(fid::ARBITRATION));
    assert_eq!(guest.wait(1), 0);
    assert_eq!(dword0(&guest, 1), 0x0102_0304, "it was saved");
    guest.submit(get(fid::ERROR_RECOVERY));
    assert_eq!(guest.wait(2), 0);
    assert_eq!(dword0(&guest, 2), 0, "it was not");
    guest.submit(log(lid::ERROR));
    assert_eq!(guest.wait(3), 0);
    let entry = |guest: &Guest, at: u64| guest.word(DATA + at).load(Ordering::Relaxed);
    assert_eq!(entry(&guest, 0), 1, "the first error");
    let second = entry(&guest, 8);
    assert_eq!(second as u16, 0, "of the admin queue");
    assert_eq!((second >> 33) as u16 & 0x7FF, 2, "Invalid Field");
    guest.submit(log(lid::SANITIZE));
    assert_eq!(guest.wait(4), 0);
    let state = (entry(&guest, 0) >> 16) as u16 & 7;
    assert_eq!(state, sanitize_state::IN_PROGRESS);
}
