//! The rules that the auditor checks, each with the side that has to obey it and its place in the
//! specification.

use core::fmt;

/// The side that has to keep a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProtocolSide {
    /// The driver.
    Host,
    /// The device.
    Controller,
}

macro_rules! rules {
    ($($name:ident $side:ident $text:literal $title:literal,)*) => {
        /// A rule of the specification whose violation can be seen on the wire.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Rule {
            $(#[doc = $text] $name,)*
        }

        impl Rule {
            /// Every rule.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// Returns the side that has to keep the rule.
            pub const fn side(self) -> ProtocolSide {
                match self { $(Self::$name => ProtocolSide::$side),* }
            }

            /// Returns the violation in words.
            pub const fn text(self) -> &'static str {
                match self { $(Self::$name => $text),* }
            }

            /// Returns the revision and the title of the specification's section.
            pub const fn title(self) -> &'static str {
                match self { $(Self::$name => $title),* }
            }
        }
    };
}

rules! {
    CidReused Host "the identifier of a command in flight is used again"
        "NVMe Base 2.0c, Submission Queue Entry (Command Identifier)",
    BufferShared Host "memory that the device writes belongs to another command in flight"
        "NVMe Base 2.0c, Data Transfer",
    ListChanged Host "a PRP or SGL list changed while its command was in flight"
        "NVMe Base 2.0c, Physical Region Page Entry and List",
    EntryChanged Host "an entry was not complete when the doorbell published it"
        "NVMe over PCIe 1.0c, Submission Queue y Tail Doorbell",
    TailDoorbell Host "the tail doorbell went back, or past entries that are not free"
        "NVMe over PCIe 1.0c, Submission Queue y Tail Doorbell",
    HeadDoorbell Host "the head doorbell went back, or past entries that were not posted"
        "NVMe over PCIe 1.0c, Completion Queue y Head Doorbell",
    DoorbellRange Host "a doorbell value lies outside the queue"
        "NVMe Base 2.0c, Asynchronous Event Information (Invalid Doorbell Write Value)",
    DoorbellAbsent Host "the doorbell of a queue that does not exist was written"
        "NVMe Base 2.0c, Asynchronous Event Information (Write to Invalid Doorbell Register)",
    NamespaceAbsent Host "a command names a namespace that does not exist"
        "NVMe Base 2.0c, Valid and Invalid NSIDs",
    OpcodeUnsupported Host "the controller has said that it lacks this command"
        "NVMe Base 2.0c, Identify Controller Data Structure (OACS, ONCS)",
    PrpEntry Host "a PRP entry has an offset where none may be, or is zero where one is needed"
        "NVMe Base 2.0c, Physical Region Page Entry and List",
    SglDescriptor Host "an SGL is used where none may be, or does not describe the data"
        "NVMe Base 2.0c, Scatter Gather List",
    ListAbsent Host "a PRP or SGL list lies where the device cannot read"
        "NVMe Base 2.0c, Physical Region Page Entry and List",
    TooLong Host "a command moves more than MDTS allows"
        "NVMe Base 2.0c, Identify Controller Data Structure (MDTS)",
    LbaRange Host "a command names blocks past the end of its namespace"
        "NVM Command Set 1.0c, LBA Out of Range",
    PhaseTag Controller "a completion carries the phase tag of the pass before"
        "NVMe Base 2.0c, Phase Tag",
    SqHead Controller "a completion reports a submission queue head that cannot be"
        "NVMe Base 2.0c, Common Completion Queue Entry (SQ Head Pointer)",
    CqOverrun Controller "a completion was posted over one that the driver has not taken"
        "NVMe Base 2.0c, Full Queue",
    EntryOrder Controller "an entry was fetched or posted out of turn"
        "NVMe Base 2.0c, Queue Processing",
    FetchedEarly Controller "an entry was fetched that the tail doorbell had not published"
        "NVMe Base 2.0c, Queue Processing",
    UnknownCommand Controller "a completion names a command that is not in flight"
        "NVMe Base 2.0c, Common Completion Queue Entry (Command Identifier)",
    UnknownQueue Controller "a completion names a submission queue that does not complete there"
        "NVMe Base 2.0c, Common Completion Queue Entry (SQ Identifier)",
    TornEntry Controller "the phase tag was visible before the rest of the completion"
        "NVMe Base 2.0c, Phase Tag",
    DataLate Controller "data of a command moved that had ended"
        "NVMe Base 2.0c, Completion Queue Entry",
    QueueAccepted Controller "a queue was created or deleted against the rules"
        "NVMe Base 2.0c, Create I/O Submission Queue command",
}

/// A violation of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The rule.
    pub rule: Rule,
    /// The queue of the doorbell or of the command.
    pub qid: u16,
    /// The command's identifier, where there is a command.
    pub cid: Option<u16>,
    /// The wrong value: a doorbell, an address, an opcode or a head.
    pub value: u64,
    /// Number of commands fetched before it.
    pub commands: u64,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let who = match self.rule.side() {
            ProtocolSide::Host => "driver",
            ProtocolSide::Controller => "controller",
        };
        write!(f, "{who}: queue {}", self.qid)?;
        if let Some(cid) = self.cid {
            write!(f, " command {cid:#06x}")?;
        }
        write!(
            f,
            ": {:?}, {} ({:#x}, after {} commands; {})",
            self.rule,
            self.rule.text(),
            self.value,
            self.commands,
            self.rule.title()
        )
    }
}
