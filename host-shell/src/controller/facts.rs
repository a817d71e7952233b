//! What handles go by: facts of the controller and of its namespaces that were read once, and what became of them.
//!
//! Another host may format, shrink, delete, write-protect or sanitize a namespace, or activate firmware that transfers
//! less, and after a reset another drive may answer. A command that goes by old facts then writes to wrong places.
//!
//! - [`Alarm`]: a count that rises when something may have changed. Each submission compares it with the count that its
//!   queue has seen, one relaxed load.
//! - [`Facts`]: what the controller said last. The session reads it again before a queue that has seen another count
//!   sends anything (`session/verify.rs`).
//! - [`Basis`]: what one queue goes by, and which commands it may not send any more.

use crate::error::{Error, Result};
use crate::lock::lock;
use nvme_core::bringup::{Info, NamespaceChange, NamespaceInfo};
use nvme_core::spec::identify::PrintableText;
use nvme_core::spec::log_page::{AsyncEvent, command_set_event, event_type, lid, notice_event};
use nvme_core::spec::{Nsid, Status};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Rises when facts may have changed.
#[derive(Debug, Default)]
pub(crate) struct Alarm {
    raised: AtomicU64,
    /// How often the data of all namespaces were erased.
    erased: AtomicU64,
}

/// Notices after which facts are read again.
const TELLING_NOTICES: [u8; 2] = [
    notice_event::NAMESPACE_ATTRIBUTE,
    notice_event::FIRMWARE_ACTIVATION,
];

impl Alarm {
    /// How often it was raised.
    #[inline]
    pub fn count(&self) -> u64 {
        // The facts themselves are behind a lock.
        self.raised.load(Ordering::Relaxed)
    }

    /// Something may have changed.
    pub fn raise(&self) {
        self.raised.fetch_add(1, Ordering::Relaxed);
    }

    /// A sanitize operation runs or has ended: no data are what they were.
    fn erase(&self) {
        self.erased.fetch_add(1, Ordering::Relaxed);
        self.raise();
    }

    /// Looks at an event of the controller.
    pub fn hear(&self, event: AsyncEvent) {
        match (event.event_type(), event.info()) {
            (event_type::NOTICE, info) if TELLING_NOTICES.contains(&info) => self.raise(),
            (event_type::COMMAND_SET, info)
                if event.log_page() == lid::SANITIZE
                    && (info == command_set_event::SANITIZE_COMPLETED
                        || info == command_set_event::SANITIZE_DEALLOCATED) =>
            {
                self.erase();
            }
            _ => {}
        }
    }

    /// Looks at the status of an I/O command that failed: some tell what no event has told.
    pub fn see(&self, status: Status) {
        let code = status.code();
        let telling = [
            Status::INVALID_NAMESPACE,
            Status::LBA_OUT_OF_RANGE,
            Status::NAMESPACE_WRITE_PROTECTED,
            Status::WRITE_TO_READ_ONLY,
            Status::FORMAT_IN_PROGRESS,
        ];
        let erasing = [Status::SANITIZE_IN_PROGRESS, Status::SANITIZE_FAILED];
        if erasing.iter().any(|one| one.code() == code) {
            self.erase();
        } else if telling.iter().any(|one| one.code() == code) {
            self.raise();
        }
    }
}

/// What a queue was made for.
#[derive(Clone, Debug, Default)]
struct Told {
    namespaces: BTreeMap<Nsid, NamespaceInfo>,
    serial: [u8; 20],
    /// Bytes of a command, as MDTS says.
    max_transfer: u64,
    erased: u64,
}

#[derive(Default)]
struct Known {
    /// What callers were told last.
    told: Arc<Told>,
    /// What the controller said last of the namespaces that anyone was told of.
    now: BTreeMap<Nsid, NamespaceInfo>,
    serial: [u8; 20],
    max_transfer: u64,
}

/// What the controller said last.
#[derive(Default)]
pub(crate) struct Facts {
    pub alarm: Arc<Alarm>,
    /// The alarm's count when all facts were last read.
    checked: AtomicU64,
    known: Mutex<Known>,
}

impl Facts {
    /// Takes what the first bring-up found.
    pub fn begin(&self, info: &Info) {
        let namespaces: BTreeMap<_, _> = info
            .namespaces
            .iter()
            .filter(|one| one.identified.is_success())
            .map(|one| (one.nsid, *one))
            .collect();
        let max_transfer = info.max_transfer.unwrap_or(u64::MAX);
        *lock(&self.known) = Known {
            now: namespaces.clone(),
            told: Arc::new(Told {
                namespaces,
                serial: info.serial,
                max_transfer,
                erased: 0,
            }),
            serial: info.serial,
            max_transfer,
        };
    }

    /// A caller is told that a namespace is `info`, and goes by that from now on.
    pub fn tell(&self, info: NamespaceInfo) {
        let mut known = lock(&self.known);
        let erased = self.alarm.erased.load(Ordering::Relaxed);
        let (serial, max_transfer) = (known.serial, known.max_transfer);
        let told = Arc::make_mut(&mut known.told);
        told.namespaces.insert(info.nsid, info);
        (told.serial, told.max_transfer, told.erased) = (serial, max_transfer, erased);
        self.note(&mut known, info);
    }

    /// A namespace is `info` now.
    pub fn observe(&self, info: NamespaceInfo) {
        self.note(&mut lock(&self.known), info);
    }

    fn note(&self, known: &mut Known, info: NamespaceInfo) {
        let before = known.now.insert(info.nsid, info);
        if before.is_some_and(|before| before.change(&info).is_some()) {
            self.alarm.raise();
        }
    }

    /// The controller is this one now.
    pub fn observe_controller(&self, serial: [u8; 20], max_transfer: u64) {
        let mut known = lock(&self.known);
        (known.serial, known.max_transfer) = (serial, max_transfer);
    }

    /// Takes what the bring-up after a reset found. Namespaces that it does not list are read again later.
    pub fn observe_all(&self, info: &Info) {
        self.observe_controller(info.serial, info.max_transfer.unwrap_or(u64::MAX));
        let missing = |nsid: &Nsid| {
            let listed = info.namespaces.iter().any(|one| one.nsid == *nsid);
            !listed && !info.more_namespaces
        };
        let missing: Vec<Nsid> = self.namespaces().into_iter().filter(missing).collect();
        for one in &info.namespaces {
            self.observe(*one);
        }
        for nsid in missing {
            self.observe(NamespaceInfo::unknown(nsid, Status::SUCCESS));
        }
        self.alarm.raise();
    }

    /// Namespaces that callers were told of.
    pub fn namespaces(&self) -> Vec<Nsid> {
        lock(&self.known).now.keys().copied().collect()
    }

    /// The alarm's count when all facts were last read.
    pub fn checked(&self) -> u64 {
        self.checked.load(Ordering::Acquire)
    }

    /// All facts are as the controller said them after the alarm had been raised `count` times.
    pub fn set_checked(&self, count: u64) {
        // Release: who sees the count finds the facts behind their lock, which orders them anyway.
        self.checked.store(count, Ordering::Release);
    }
}

/// What a queue goes by.
#[derive(Clone, Debug)]
pub(crate) struct Basis {
    told: Arc<Told>,
    /// The alarm's count at which all of `told` held.
    seen: Option<u64>,
    refusals: Refusals,
}

/// Commands that may not be sent any more.
#[derive(Clone, Debug, Default)]
struct Refusals {
    /// Why none may be.
    all: Option<String>,
    namespaces: Vec<(Nsid, NamespaceChange)>,
}

impl Basis {
    /// What callers have been told so far.
    pub fn new(facts: &Facts) -> Self {
        Self {
            told: Arc::clone(&lock(&facts.known).told),
            seen: None,
            refusals: Refusals::default(),
        }
    }

    /// The queue's user goes by `info`.
    pub fn goes_by(&mut self, info: NamespaceInfo) {
        Arc::make_mut(&mut self.told)
            .namespaces
            .insert(info.nsid, info);
        self.seen = None;
    }

    /// Whether nothing has happened since all of it held.
    #[inline]
    pub fn is_current(&self, alarm: &Alarm) -> bool {
        self.seen == Some(alarm.count())
    }

    /// Compares with `facts`, which were read when the alarm's count was `count`; or says that they could not be read.
    pub fn compare(&mut self, facts: &Facts, count: Result<u64>) {
        let count = match count {
            Ok(count) => count,
            Err(error) => {
                self.seen = None;
                self.refusals.all =
                    Some(format!("what the device is now could not be read: {error}"));
                return;
            }
        };
        let known = lock(&facts.known);
        self.refusals.all = self.told.differs(&known, &facts.alarm);
        self.refusals.namespaces = self
            .told
            .namespaces
            .iter()
            .filter_map(|(nsid, told)| Some((*nsid, told.change(known.now.get(nsid)?)?)))
            .collect();
        let holds = self.refusals.all.is_none() && self.refusals.namespaces.is_empty();
        self.seen = holds.then_some(count);
    }

    /// Whether commands of every kind may be sent.
    pub fn holds(&self) -> bool {
        self.seen.is_some()
    }

    /// Why a command with `opcode` for namespace `nsid` may not be sent.
    #[inline]
    pub fn refusal(&self, nsid: u32, opcode: u8) -> Option<String> {
        match self.seen {
            Some(_) => None,
            None => self.refusals.of(nsid, opcode),
        }
    }

    /// The same as an error.
    pub fn check(&self, nsid: Nsid, opcode: u8) -> Result<()> {
        match self.refusal(nsid.0, opcode) {
            Some(cause) => Err(Error::Changed { cause }),
            None => Ok(()),
        }
    }
}

impl Refusals {
    #[cold]
    fn of(&self, nsid: u32, opcode: u8) -> Option<String> {
        if self.all.is_some() {
            return self.all.clone();
        }
        let mut changes = self.namespaces.iter();
        let (nsid, change) = changes.find(|(of, change)| of.0 == nsid && !change.allows(opcode))?;
        Some(format!("namespace {nsid} {change}"))
    }
}

impl Told {
    /// Why nothing of it holds any more.
    fn differs(&self, known: &Known, alarm: &Alarm) -> Option<String> {
        if self.serial != known.serial {
            return Some(format!(
                "another controller answers: its serial number is {}, not {}",
                PrintableText(&known.serial),
                PrintableText(&self.serial)
            ));
        }
        if self.max_transfer > known.max_transfer {
            let before = match self.max_transfer {
                u64::MAX => "no limit".to_owned(),
                bytes => format!("{bytes} bytes"),
            };
            return Some(format!(
                "the controller's largest transfer (MDTS) fell from {before} to {} bytes",
                known.max_transfer
            ));
        }
        (self.erased != alarm.erased.load(Ordering::Relaxed))
            .then(|| "the device was sanitized: the data of all its namespaces are gone".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvme_core::spec::nvm;

    const NS: Nsid = Nsid(1);

    fn info(block_bytes: u32, blocks: u64) -> NamespaceInfo {
        NamespaceInfo {
            block_bytes,
            blocks,
            ..NamespaceInfo::unknown(NS, Status::SUCCESS)
        }
    }

    fn refusal(basis: &Basis, opcode: u8) -> String {
        basis.refusal(NS.0, opcode).unwrap_or_default()
    }

    #[test]
    fn a_queue_goes_by_what_its_maker_was_told() {
        let facts = Facts::default();
        facts.tell(info(4096, 10));
        let mut old = Basis::new(&facts);
        old.compare(&facts, Ok(0));
        assert!(old.is_current(&facts.alarm));
        facts.observe(info(512, 80));
        assert!(!old.is_current(&facts.alarm), "the alarm was raised");
        old.compare(&facts, Ok(1));
        let cause = refusal(&old, nvm::opcode::READ);
        assert_eq!(
            cause,
            "namespace 1 was formatted (4096 -> 512 bytes a block)"
        );
        assert_eq!(old.refusal(2, nvm::opcode::READ), None, "another namespace");
        // One that is made before anyone was told of the change goes by the old facts, too.
        let mut young = Basis::new(&facts);
        young.compare(&facts, Ok(1));
        assert!(!refusal(&young, nvm::opcode::WRITE).is_empty());
        facts.tell(info(512, 80));
        let mut new = Basis::new(&facts);
        new.compare(&facts, Ok(1));
        assert!(new.is_current(&facts.alarm));
        // But who says what it goes by is held to that.
        new.goes_by(info(4096, 10));
        new.compare(&facts, Ok(1));
        assert!(!refusal(&new, nvm::opcode::READ).is_empty());
    }

    #[test]
    fn each_change_has_its_words_and_more_blocks_are_none() {
        let before = info(512, 80);
        let cases = [
            (info(512, 90), ""),
            (
                NamespaceInfo {
                    boundary_blocks: 8,
                    ..before
                },
                "",
            ),
            (info(512, 79), "has become smaller (80 -> 79 blocks)"),
            (
                NamespaceInfo::unknown(NS, Status::SUCCESS),
                "was deleted or detached",
            ),
            (
                NamespaceInfo {
                    metadata_bytes: 8,
                    ..before
                },
                "was formatted (0 -> 8 bytes of metadata a block)",
            ),
            (
                NamespaceInfo {
                    protection: 1,
                    ..before
                },
                "was formatted with other protection information",
            ),
            (
                NamespaceInfo {
                    nguid: [1; 16],
                    ..before
                },
                "is another one than before (NGUID or EUI-64 differ)",
            ),
            (
                NamespaceInfo {
                    write_protected: true,
                    ..before
                },
                "has become write protected",
            ),
        ];
        for (now, words) in cases {
            let change = before
                .change(&now)
                .map_or(String::new(), |change| change.to_string());
            assert_eq!(change, words);
        }
        let gone = before.change(&NamespaceInfo::unknown(NS, Status::INVALID_NAMESPACE));
        assert!(gone.unwrap().to_string().contains("Invalid Namespace"));
        let protected = before.change(&cases[7].0).unwrap();
        let allowed = |opcode| protected.allows(opcode);
        assert!(allowed(nvm::opcode::READ) && allowed(nvm::opcode::FLUSH));
        assert!(!allowed(nvm::opcode::WRITE) && !allowed(nvm::opcode::DATASET_MANAGEMENT));
    }

    #[test]
    fn another_controller_and_an_erased_one_are_refused_as_a_whole() {
        let facts = Facts::default();
        facts.tell(info(512, 80));
        let basis = Basis::new(&facts);
        let says = |facts: &Facts| {
            let mut basis = basis.clone();
            basis.compare(facts, Ok(0));
            refusal(&basis, nvm::opcode::READ)
        };
        facts.observe_controller(*b"OTHER               ", 0);
        assert!(says(&facts).starts_with("another controller answers: its serial number is OTHER"));
        facts.observe_controller([0; 20], 0);
        assert_eq!(says(&facts), "");
        facts.alarm.see(Status::UNRECOVERED_READ_ERROR);
        assert_eq!(facts.alarm.count(), 0);
        facts.alarm.see(Status::SANITIZE_IN_PROGRESS);
        assert!(says(&facts).contains("was sanitized"));
        facts.tell(info(512, 80));
        let mut again = Basis::new(&facts);
        again.compare(&facts, Ok(1));
        assert!(again.is_current(&facts.alarm), "opened again");
        again.compare(&facts, Err(Error::Interrupted));
        assert!(refusal(&again, nvm::opcode::READ).contains("interrupted"));
    }

    /// What no event has told may be told by the status of any command.
    #[test]
    fn each_status_and_notice_that_tells_of_a_change_raises_the_alarm() {
        let raised = |tell: &dyn Fn(&Alarm)| {
            let alarm = Alarm::default();
            tell(&alarm);
            alarm.count()
        };
        let telling = [
            Status::INVALID_NAMESPACE,
            Status::LBA_OUT_OF_RANGE,
            Status::NAMESPACE_WRITE_PROTECTED,
            Status::WRITE_TO_READ_ONLY,
            Status::FORMAT_IN_PROGRESS,
            Status::SANITIZE_IN_PROGRESS,
            Status::SANITIZE_FAILED,
        ];
        for status in telling {
            assert_eq!(raised(&|alarm| alarm.see(status)), 1, "{status}");
        }
        for status in [Status::SUCCESS, Status::COMPARE_FAILURE] {
            assert_eq!(raised(&|alarm| alarm.see(status)), 0, "{status}");
        }
        let (attribute, activation) = (
            notice_event::NAMESPACE_ATTRIBUTE,
            notice_event::FIRMWARE_ACTIVATION,
        );
        let sanitized = command_set_event::SANITIZE_COMPLETED;
        let events = [
            (event_type::NOTICE, attribute, lid::CHANGED_NAMESPACES, 1),
            (event_type::NOTICE, activation, lid::FIRMWARE, 1),
            (event_type::COMMAND_SET, sanitized, lid::SANITIZE, 1),
            (event_type::SMART, 1, lid::SMART, 0),
        ];
        for (kind, info, page, count) in events {
            let mut event = AsyncEvent(0);
            event.set_event_type(kind);
            event.set_info(info);
            event.set_log_page(page);
            assert_eq!(raised(&|alarm| alarm.hear(event)), count, "{event}");
        }
    }

    #[test]
    fn the_largest_transfer_may_grow_and_may_not_fall() {
        let facts = Facts::default();
        facts.observe_controller([0; 20], 65_536);
        facts.tell(info(512, 80));
        let says = |bytes| {
            facts.observe_controller([0; 20], bytes);
            let mut basis = Basis::new(&facts);
            basis.compare(&facts, Ok(0));
            refusal(&basis, nvm::opcode::READ)
        };
        assert_eq!(says(65_536), "");
        assert_eq!(says(131_072), "");
        assert_eq!(
            says(32_768),
            "the controller's largest transfer (MDTS) fell from 65536 bytes to 32768 bytes"
        );
    }

    /// Each of the namespaces that a queue goes by is compared, wherever it stands among them.
    #[test]
    fn a_change_of_any_namespace_is_found() {
        for changed in 1..=3 {
            let facts = Facts::default();
            let of = |nsid, blocks| NamespaceInfo {
                nsid: Nsid(nsid),
                ..info(512, blocks)
            };
            (1..=3).for_each(|nsid| facts.tell(of(nsid, 80)));
            let mut basis = Basis::new(&facts);
            facts.observe(of(changed, 8));
            basis.compare(&facts, Ok(1));
            for nsid in 1..=3 {
                let is_refused = basis.refusal(nsid, nvm::opcode::READ).is_some();
                assert_eq!(is_refused, nsid == changed, "{nsid} of {changed}");
            }
        }
    }
}
