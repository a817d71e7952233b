//! The protocol auditor beside a controller that a test plays by hand.
//!
//! The hand may post nonsense on purpose; the driver may not break a rule in answer. Under loom there is no auditor,
//! which would be part of the model.

use nvme_core::spec::{Cqe, Sqe};

#[cfg(not(loom))]
pub use seen::Watch;

/// Reads entries of a submission ring for the auditor, by index.
pub type Entries<'a> = &'a dyn Fn(usize) -> Option<Sqe>;

#[cfg(not(loom))]
mod seen {
    use super::{Cqe, Entries, Sqe};
    use nvme_auditor::{Auditor, Finding, ProtocolSide, Rule};

    /// Address of the submission ring that the auditor gets.
    const RING: u64 = 1 << 40;

    /// An auditor of one queue pair.
    pub struct Watch(Auditor);

    impl Watch {
        /// The pair `qid` of `entries` entries was just created.
        pub fn new(qid: u16, entries: u32) -> Self {
            let mut auditor = Auditor::new();
            auditor.add_pair(qid, (Some(RING), entries), (None, entries));
            Self(auditor)
        }

        pub fn tail(&mut self, qid: u16, value: u32, entries: Entries<'_>) {
            let word = |at: u64| {
                let offset = at.checked_sub(RING)? as usize;
                let sqe = entries(offset / 64)?;
                sqe.to_words().get(offset % 64 / 8).copied()
            };
            self.0.sq_doorbell(qid, value, &word);
        }

        pub fn head(&mut self, qid: u16, value: u32) {
            self.0.cq_doorbell(qid, value);
        }

        pub fn fetched(&mut self, qid: u16, index: u32, sqe: &Sqe) {
            self.0.fetched(qid, index, sqe, &|_| None);
        }

        pub fn posted(&mut self, qid: u16, index: u32, cqe: &Cqe) {
            self.0.posted(qid, Some(index), cqe, true, &|_| None);
        }
    }

    impl Drop for Watch {
        /// # Panics
        /// If the driver has broken a rule.
        fn drop(&mut self) {
            let mut lied = false;
            let of_driver = |one: &&Finding| {
                lied |= one.rule == Rule::UnknownCommand;
                // A command that ended before it was fetched is over for the driver alone.
                let explained = [Rule::CidReused, Rule::TailDoorbell, Rule::EntryChanged];
                one.rule.side() == ProtocolSide::Host && !(lied && explained.contains(&one.rule))
            };
            let findings: Vec<String> = self
                .0
                .findings()
                .iter()
                .filter(of_driver)
                .map(ToString::to_string)
                .collect();
            let text = format!("the auditor found:\n{}", findings.join("\n"));
            if std::thread::panicking() {
                eprintln!("{text}");
            } else {
                assert!(findings.is_empty(), "{text}");
            }
        }
    }
}

/// Watches nothing.
#[cfg(loom)]
pub struct Watch;

#[cfg(loom)]
impl Watch {
    pub fn new(_qid: u16, _entries: u32) -> Self {
        Self
    }

    pub fn tail(&mut self, _qid: u16, _value: u32, _entries: Entries<'_>) {}

    pub fn head(&mut self, _qid: u16, _value: u32) {}

    pub fn fetched(&mut self, _qid: u16, _index: u32, _sqe: &Sqe) {}

    pub fn posted(&mut self, _qid: u16, _index: u32, _cqe: &Cqe) {}
}
