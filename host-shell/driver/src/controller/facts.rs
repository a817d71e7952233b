//! Facts of the controller and of its namespaces that were read once and that handles rely on, and the changes of them.
//!
//! Another host may format, shrink, delete, write-protect or sanitize a namespace, or activate firmware that transfers
//! less, and after a reset another drive may answer. A command that relies on old facts then writes to wrong blocks.
//!
//! - [`FactsAlarm`]: a count that rises when something may have changed. Each submission compares it with the count
//!   that its queue has seen, one relaxed load.
//! - [`DeviceFacts`]: what the controller reported last. The session reads it again before a queue that has seen
//!   another count sends anything (`session/verify.rs`).
//! - [`QueueFacts`]: the facts that one queue relies on, and the commands that it may not send any more.

use crate::controller::effect::CommandEffect;
use crate::error::{Error, Result};
use crate::lock::lock;
use nvme_core::bringup::{ControllerInfo, NamespaceChange, NamespaceInfo};
use nvme_core::spec::identify::PrintableText;
use nvme_core::spec::log_page::{AsyncEvent, command_set_event, event_type, lid, notice_event};
use nvme_core::spec::nvm::opcode;
use nvme_core::spec::{Nsid, Sqe, Status};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Rises when facts may have changed.
#[derive(Debug, Default)]
pub(crate) struct FactsAlarm {
    raised: AtomicU64,
    /// Number of times that the data of all namespaces were erased.
    erased: AtomicU64,
}

/// Notices after which facts are read again.
const TELLING_NOTICES: [u8; 2] = [
    notice_event::NAMESPACE_ATTRIBUTE,
    notice_event::FIRMWARE_ACTIVATION,
];

impl FactsAlarm {
    /// Returns the number of times that it was raised.
    #[inline]
    pub fn count(&self) -> u64 {
        // The facts themselves are behind a lock.
        self.raised.load(Ordering::Relaxed)
    }

    /// Records that something may have changed, so that the facts are read again before they are
    /// relied on.
    pub fn raise(&self) {
        self.raised.fetch_add(1, Ordering::Relaxed);
    }

    /// Records that a sanitize operation runs or has ended, so that no data can be relied on.
    pub fn erase(&self) {
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

    /// Examines the status of a failed I/O command: some statuses reveal a change that no event announced.
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

/// Facts on which a queue's user relies.
#[derive(Clone, Debug, Default)]
struct ReportedFacts {
    namespaces: BTreeMap<Nsid, NamespaceInfo>,
    /// Erasures of each namespace by this process, as of then.
    erasures: BTreeMap<Nsid, u64>,
    serial: [u8; 20],
    /// Bytes of a command, as MDTS says.
    max_transfer: u64,
    erased: u64,
}

#[derive(Default)]
struct KnownFacts {
    /// Facts that callers received last.
    told: Arc<ReportedFacts>,
    /// Latest Identify data of every namespace whose data a caller has received.
    now: BTreeMap<Nsid, NamespaceInfo>,
    /// Erasures of each namespace by this process, until now.
    erasures: BTreeMap<Nsid, u64>,
    serial: [u8; 20],
    max_transfer: u64,
    /// Format NVM Attributes.
    fna: u8,
}

/// Latest facts about controller and namespaces, compared with those that callers rely on.
#[derive(Default)]
pub(crate) struct DeviceFacts {
    pub alarm: Arc<FactsAlarm>,
    /// The alarm's count when all facts were last read.
    checked: AtomicU64,
    known: Mutex<KnownFacts>,
}

impl DeviceFacts {
    /// Records the results of the first bring-up.
    pub fn begin(&self, info: &ControllerInfo) {
        let namespaces: BTreeMap<_, _> = info
            .namespaces
            .iter()
            .filter(|one| one.identified.is_success())
            .map(|one| (one.nsid, *one))
            .collect();
        let max_transfer = info.max_transfer.unwrap_or(u64::MAX);
        *lock(&self.known) = KnownFacts {
            now: namespaces.clone(),
            told: Arc::new(ReportedFacts {
                namespaces,
                erasures: BTreeMap::new(),
                serial: info.serial,
                max_transfer,
                erased: 0,
            }),
            erasures: BTreeMap::new(),
            serial: info.serial,
            max_transfer,
            fna: 0,
        };
    }

    /// Returns the effect of an admin command of this process, given the Format NVM Attributes that were read.
    pub fn effect_of(&self, sqe: &Sqe) -> CommandEffect {
        CommandEffect::of(sqe, lock(&self.known).fna)
    }

    /// Records that this process is about to erase the data of namespace `nsid`, or of all with
    /// [`Nsid::ALL`]: handles are refused from now on. The caller has the admin queue; nothing else
    /// is known to have changed.
    pub fn erase(&self, nsid: Nsid) {
        self.count_erasure(nsid, 1);
    }

    /// Takes an erasure back, because the controller refused it.
    pub fn was_not_erased(&self, nsid: Nsid) {
        self.count_erasure(nsid, 0u64.wrapping_sub(1));
    }

    fn count_erasure(&self, nsid: Nsid, change: u64) {
        let mut known = lock(&self.known);
        let is_it = |one: &Nsid| nsid == Nsid::ALL || *one == nsid;
        let which: Vec<Nsid> = known.now.keys().copied().filter(is_it).collect();
        for nsid in which {
            let count = known.erasures.entry(nsid).or_default();
            *count = count.wrapping_add(change);
        }
        drop(known);
        // Unless something else was raised that waits to be looked at, nothing has to be read again for this.
        let before = self.alarm.raised.fetch_add(1, Ordering::Relaxed);
        if self.checked() == before {
            self.set_checked(before + 1);
        }
    }

    /// Records that a caller receives `info` of a namespace, and relies on it from now on.
    pub fn tell(&self, info: NamespaceInfo) {
        let mut known = lock(&self.known);
        let erased = self.alarm.erased.load(Ordering::Relaxed);
        let (serial, max_transfer) = (known.serial, known.max_transfer);
        let erasures = known.erasures.get(&info.nsid).copied();
        let told = Arc::make_mut(&mut known.told);
        told.namespaces.insert(info.nsid, info);
        told.erasures
            .extend(erasures.map(|count| (info.nsid, count)));
        (told.serial, told.max_transfer, told.erased) = (serial, max_transfer, erased);
        self.note(&mut known, info);
    }

    /// Records the properties of a namespace as read now.
    pub fn observe(&self, info: NamespaceInfo) {
        self.note(&mut lock(&self.known), info);
    }

    fn note(&self, known: &mut KnownFacts, info: NamespaceInfo) {
        let before = known.now.insert(info.nsid, info);
        if before.is_some_and(|before| before.change(&info).is_some()) {
            self.alarm.raise();
        }
    }

    /// Records the controller's serial number and transfer limit as read now.
    pub fn observe_controller(&self, serial: [u8; 20], max_transfer: u64) {
        let mut known = lock(&self.known);
        (known.serial, known.max_transfer) = (serial, max_transfer);
    }

    /// Records the controller's Format NVM Attributes.
    pub fn observe_fna(&self, fna: u8) {
        lock(&self.known).fna = fna;
    }

    /// Records the result of the bring-up after a reset, and has everything read again before the next command:
    /// a change between the reading during bring-up and the arming of events would be announced by no event.
    pub fn observe_all(&self, info: &ControllerInfo) {
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

    /// Returns the namespaces that callers were given.
    pub fn namespaces(&self) -> Vec<Nsid> {
        lock(&self.known).now.keys().copied().collect()
    }

    /// Returns the alarm's count when all facts were last read. The acquire pairs with the store after the
    /// facts, so that a caller that finds the count current finds the facts of that time, too.
    pub fn checked(&self) -> u64 {
        self.checked.load(Ordering::Acquire)
    }

    /// Records that all facts were read after the alarm had been raised `count` times.
    pub fn set_checked(&self, count: u64) {
        // Release: a thread that loads the count finds the facts that were read for it. (The lock around the
        // facts orders them as well; the count must not be the weaker of the two.)
        self.checked.store(count, Ordering::Release);
    }
}

/// Facts on which a queue relies, and the outcome of their last comparison.
#[derive(Clone, Debug)]
pub(crate) struct QueueFacts {
    told: Arc<ReportedFacts>,
    /// The alarm's count at which it was last compared.
    seen: Option<u64>,
    refusals: Option<RefusedCommands>,
}

/// Commands that may not be sent.
#[derive(Clone, Debug, Default)]
struct RefusedCommands {
    /// Reason why no command at all may be sent.
    all: Option<Arc<Error>>,
    namespaces: Vec<(Nsid, ReportedChange)>,
}

/// Change of a namespace since its facts were given to a caller.
#[derive(Clone, Debug)]
enum ReportedChange {
    Facts(NamespaceChange),
    /// The data were erased by a command of this process, which leaves the properties as they are.
    Erased,
}

impl ReportedChange {
    fn allows(&self, opcode: u8) -> bool {
        matches!(self, Self::Facts(change) if change.allows(opcode))
    }
}

impl fmt::Display for ReportedChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Facts(change) => change.fmt(f),
            Self::Erased => f.write_str("was formatted or deleted: its data are gone"),
        }
    }
}

impl QueueFacts {
    /// Takes the facts that callers have received so far as the basis.
    pub fn new(facts: &DeviceFacts) -> Self {
        Self {
            told: Arc::clone(&lock(&facts.known).told),
            seen: None,
            refusals: None,
        }
    }

    /// Records that the queue's user relies on `info`.
    pub fn goes_by(&mut self, info: NamespaceInfo) {
        Arc::make_mut(&mut self.told)
            .namespaces
            .insert(info.nsid, info);
        self.seen = None;
    }

    /// True if nothing has happened since the last comparison.
    #[inline]
    pub fn is_current(&self, alarm: &FactsAlarm) -> bool {
        self.seen == Some(alarm.count())
    }

    /// Returns the alarm's count of the last comparison; `None` where the facts could not be read.
    #[inline]
    pub fn seen(&self) -> Option<u64> {
        self.seen
    }

    /// Compares with `facts`, which were read when the alarm's count was `count`.
    pub fn compare(&mut self, facts: &DeviceFacts, count: u64) {
        let known = lock(&facts.known);
        let all = self.told.differs(&known, &facts.alarm);
        let all = all.map(|cause| Arc::new(Error::Changed { cause }));
        let changes = self.told.namespaces.iter();
        let changes =
            changes.filter_map(|(nsid, told)| Some((*nsid, self.told.change(told, &known)?)));
        let namespaces: Vec<_> = changes.collect();
        let holds = all.is_none() && namespaces.is_empty();
        self.refusals = (!holds).then_some(RefusedCommands { all, namespaces });
        self.seen = Some(count);
    }

    /// Records that the facts could not be read: no command may be sent, for that reason, until they were.
    pub fn could_not_look(&mut self, error: &Error) {
        let error = error.with_context("what the device is now could not be read");
        self.refusals = Some(RefusedCommands {
            all: Some(Arc::new(error)),
            namespaces: Vec::new(),
        });
        self.seen = None;
    }

    /// Returns the error if a command with `opcode` for namespace `nsid` may not be sent: [`Error::Changed`],
    /// or the error of the last reading.
    #[inline]
    pub fn refusal(&self, nsid: u32, opcode: u8) -> Option<Error> {
        self.refusals.as_ref()?.of(nsid, opcode)
    }

    /// Returns the refusal as a result.
    pub fn check(&self, nsid: Nsid, opcode: u8) -> Result<()> {
        self.refusal(nsid.0, opcode).map_or(Ok(()), Err)
    }
}

impl RefusedCommands {
    #[cold]
    fn of(&self, nsid: u32, opcode: u8) -> Option<Error> {
        if let Some(error) = &self.all {
            return Some(error.again());
        }
        let mut changes = self.namespaces.iter();
        let (nsid, change) = changes.find(|(of, change)| of.0 == nsid && !change.allows(opcode))?;
        Some(Error::Changed {
            cause: format!("namespace {nsid} {change}"),
        })
    }
}

impl ReportedFacts {
    /// Returns the change of a namespace since the caller received it as `told`.
    fn change(&self, told: &NamespaceInfo, known: &KnownFacts) -> Option<ReportedChange> {
        let change = known.now.get(&told.nsid).and_then(|now| told.change(now));
        let count = |of: &BTreeMap<Nsid, u64>| of.get(&told.nsid).copied().unwrap_or(0);
        let is_erased = count(&self.erasures) != count(&known.erasures);
        let erased = is_erased.then_some(ReportedChange::Erased);
        change
            .filter(|change| !(is_erased && change.allows(opcode::READ)))
            .map(ReportedChange::Facts)
            .or(erased)
    }

    /// Returns the reason if the device as a whole has changed.
    fn differs(&self, known: &KnownFacts, alarm: &FactsAlarm) -> Option<String> {
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
mod tests;
