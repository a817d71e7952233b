//! The messages of vfio-user in their layout on the socket, for servers and clients alike.
//!
//! All numbers have the byte order of the host. Nothing here checks a message: its receiver checks
//! the size, the flags and every field that it uses.
//!
//! The simulated controller and the driver share these messages and no logic.
//!
//! "vfio-user Protocol Specification", version 0.9.2; the shadow ioeventfd is an extension of
//! libvfio-user.

use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Major protocol version; both sides must have the same.
pub const MAJOR: u16 = 0;
/// Highest minor protocol version supported here.
pub const MINOR: u16 = 1;

/// Vendor and device in the first four bytes of the simulator's configuration space. A client
/// recognises by them that no physical drive is behind the socket.
pub const SIMULATOR: [u16; 2] = [0x4E56, 0x0001];

/// Command numbers.
pub mod command {
    /// Negotiates version and capabilities; the first message of a client.
    pub const VERSION: u16 = 1;
    /// Gives the server memory for DMA, by descriptor or by messages.
    pub const DMA_MAP: u16 = 2;
    /// Takes memory back.
    pub const DMA_UNMAP: u16 = 3;
    /// Number of regions and interrupt types.
    pub const DEVICE_GET_INFO: u16 = 4;
    /// Size, flags and mappable areas of a region.
    pub const DEVICE_GET_REGION_INFO: u16 = 5;
    /// Returns descriptors that are signalled as a replacement for writes to a region.
    pub const DEVICE_GET_REGION_IO_FDS: u16 = 6;
    /// Number and abilities of an interrupt type.
    pub const DEVICE_GET_IRQ_INFO: u16 = 7;
    /// Arms, masks or triggers interrupts.
    pub const DEVICE_SET_IRQS: u16 = 8;
    /// Reads bytes of a region.
    pub const REGION_READ: u16 = 9;
    /// Writes bytes of a region.
    pub const REGION_WRITE: u16 = 10;
    /// From server to client: reads memory that was mapped without a descriptor.
    pub const DMA_READ: u16 = 11;
    /// From server to client: writes memory that was mapped without a descriptor.
    pub const DMA_WRITE: u16 = 12;
    /// Resets the function.
    pub const DEVICE_RESET: u16 = 13;
    /// Dirty page logging of older revisions.
    pub const DIRTY_PAGES: u16 = 14;
    /// Several small region writes in one message.
    pub const REGION_WRITE_MULTI: u16 = 15;
    /// Migration and dirty page logging.
    pub const DEVICE_FEATURE: u16 = 16;
}

/// Bits 0 to 3 of [`MessageHeader::flags`]: the type of the message.
pub const TYPE_MASK: u32 = 0xF;
/// [`MessageHeader::flags`]: a command.
pub const COMMAND: u32 = 0;
/// [`MessageHeader::flags`]: a reply.
pub const REPLY: u32 = 1;
/// [`MessageHeader::flags`]: no reply is wanted.
pub const NO_REPLY: u32 = 1 << 4;
/// [`MessageHeader::flags`]: the command failed; [`MessageHeader::error`] is the reason, and no payload follows.
pub const ERROR: u32 = 1 << 5;

/// The start of every message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MessageHeader {
    /// Identifier chosen by the sender of the command, repeated in the reply.
    pub id: u16,
    /// Command number, see [`command`].
    pub command: u16,
    /// Bytes of the whole message, this header included.
    pub size: u32,
    /// [`COMMAND`] or [`REPLY`], [`NO_REPLY`], [`ERROR`].
    pub flags: u32,
    /// An errno, or 0.
    pub error: u32,
}
const _: () = assert!(size_of::<MessageHeader>() == 16);

/// Size of the longest accepted message: `MAX_TRANSFER` bytes of data and the headers before them.
pub const MAX_MESSAGE: usize = MAX_TRANSFER as usize + 64;
/// Limit of the data bytes in one read or write, unless a peer asks for fewer.
pub const MAX_TRANSFER: u32 = 1 << 20;
/// Limit of the descriptors in one message.
pub const MAX_FDS: usize = 64;
/// Number of descriptors that a peer accepts in one message if it states none.
pub const DEFAULT_FDS: usize = 1;
/// Number of DMA ranges at the same time that the specification assumes.
pub const DEFAULT_DMA_MAPS: u32 = 65_535;

/// Payload of VERSION. The JSON text of [`VersionPayload data`](VersionData) may follow, ended by a NUL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VersionPayload {
    /// [`MAJOR`].
    pub major: u16,
    /// Minor version; in a reply at most the proposed one.
    pub minor: u16,
}
const _: () = assert!(size_of::<VersionPayload>() == 4);

/// The JSON object of VERSION. Unknown members are skipped.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionData {
    /// Abilities of the sender.
    #[serde(default)]
    pub capabilities: PeerCapabilities,
}

/// Abilities of the sender of VERSION; an absent member has the default of the specification.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerCapabilities {
    /// Number of descriptors accepted in one message; 1 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_msg_fds: Option<u64>,
    /// Bytes of data accepted in one message; 1 MiB if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_data_xfer_size: Option<u64>,
    /// Number of DMA ranges at the same time; 65535 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_dma_maps: Option<u64>,
    /// Page sizes for DMA memory, as a mask; 4096 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pgsizes: Option<u64>,
    /// True if REGION_WRITE_MULTI is understood.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_multiple: Option<bool>,
}

/// Flag of [`DmaMap::flags`]: the device may read.
pub const DMA_READABLE: u32 = 1 << 0;
/// Flag of [`DmaMap::flags`]: the device may write.
pub const DMA_WRITABLE: u32 = 1 << 1;

/// Payload of DMA_MAP. At most one descriptor is sent with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DmaMap {
    /// 32.
    pub argsz: u32,
    /// [`DMA_READABLE`], [`DMA_WRITABLE`].
    pub flags: u32,
    /// Offset of the range in the file, in bytes.
    pub offset: u64,
    /// First address that the device uses.
    pub address: u64,
    /// Bytes.
    pub size: u64,
}
const _: () = assert!(size_of::<DmaMap>() == 32);

/// Flag of [`DmaUnmap::flags`]: asks for a bitmap of dirty pages (older revisions).
pub const UNMAP_DIRTY_BITMAP: u32 = 1 << 0;
/// Flag of [`DmaUnmap::flags`]: unmaps everything; address and size are 0.
pub const UNMAP_ALL: u32 = 1 << 1;

/// Payload of DMA_UNMAP and of its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DmaUnmap {
    /// 24, or more with a bitmap.
    pub argsz: u32,
    /// [`UNMAP_ALL`], [`UNMAP_DIRTY_BITMAP`].
    pub flags: u32,
    /// Address, as in the DMA_MAP.
    pub address: u64,
    /// Size, as in the DMA_MAP.
    pub size: u64,
}
const _: () = assert!(size_of::<DmaUnmap>() == 24);

/// [`DeviceInfo::flags`]: DEVICE_RESET works.
pub const DEVICE_RESETS: u32 = 1 << 0;
/// [`DeviceInfo::flags`]: a PCI function.
pub const DEVICE_PCI: u32 = 1 << 1;

/// Payload of DEVICE_GET_INFO and of its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DeviceInfo {
    /// 16.
    pub argsz: u32,
    /// [`DEVICE_RESETS`], [`DEVICE_PCI`].
    pub flags: u32,
    /// See [`region`].
    pub num_regions: u32,
    /// See [`irq`].
    pub num_irqs: u32,
}
const _: () = assert!(size_of::<DeviceInfo>() == 16);

/// Region indexes of a PCI function.
pub mod region {
    /// BAR 0; BAR n has index n.
    pub const BAR0: u32 = 0;
    /// BAR 4.
    pub const BAR4: u32 = 4;
    /// The expansion ROM.
    pub const ROM: u32 = 6;
    /// Configuration space.
    pub const CONFIG: u32 = 7;
    /// Legacy VGA.
    pub const VGA: u32 = 8;
    /// Number of region indexes.
    pub const COUNT: u32 = 9;
}

/// Flag of [`RegionInfo::flags`]: the region can be read.
pub const REGION_READABLE: u32 = 1 << 0;
/// Flag of [`RegionInfo::flags`]: the region can be written.
pub const REGION_WRITABLE: u32 = 1 << 1;
/// Flag of [`RegionInfo::flags`]: the descriptor that is sent with the reply can be mapped.
pub const REGION_MMAP: u32 = 1 << 2;
/// Flag of [`RegionInfo::flags`]: capabilities begin at `cap_offset`.
pub const REGION_CAPS: u32 = 1 << 3;

/// Payload of DEVICE_GET_REGION_INFO and the start of its reply's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RegionInfo {
    /// In a request, the payload bytes that the client has room for. In a reply, the bytes of the
    /// whole payload; if these are more, the capabilities are left out.
    pub argsz: u32,
    /// [`REGION_READABLE`] and the like.
    pub flags: u32,
    /// One of [`region`].
    pub index: u32,
    /// Offset of the first [`InfoCapability`] from the start of this structure, or 0.
    pub cap_offset: u32,
    /// Bytes; 0 when there is no such region.
    pub size: u64,
    /// Offset of the region in the descriptor.
    pub offset: u64,
}
const _: () = assert!(size_of::<RegionInfo>() == 32);

/// [`InfoCapability::id`]: [`SparseMmap`] follows.
pub const CAP_SPARSE_MMAP: u16 = 1;

/// The start of a capability of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct InfoCapability {
    /// [`CAP_SPARSE_MMAP`].
    pub id: u16,
    /// 1.
    pub version: u16,
    /// Offset of the next one from the start of [`RegionInfo`], or 0.
    pub next: u32,
}
const _: () = assert!(size_of::<InfoCapability>() == 8);

/// Follows [`InfoCapability`]; then come `areas` times [`SparseArea`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SparseMmap {
    /// Number of areas that follow.
    pub areas: u32,
    /// 0.
    pub reserved: u32,
}
const _: () = assert!(size_of::<SparseMmap>() == 8);

/// A part of a region that can be mapped: at `offset` of the region, and at [`RegionInfo::offset`]
/// plus `offset` of the descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SparseArea {
    /// Bytes from the start of the region.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
}
const _: () = assert!(size_of::<SparseArea>() == 16);

/// Payload of DEVICE_GET_REGION_IO_FDS and the start of its reply's; then come `count` times
/// [`IoEventFd`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RegionIoFds {
    /// As in [`RegionInfo`].
    pub argsz: u32,
    /// 0.
    pub flags: u32,
    /// One of [`region`].
    pub index: u32,
    /// 0 in a request; the number of sub-regions in a reply.
    pub count: u32,
}
const _: () = assert!(size_of::<RegionIoFds>() == 16);

/// Value of [`IoEventFd::kind`]: the descriptor is signalled, the written value is lost.
pub const IO_EVENTFD: u32 = 0;
/// Value of [`IoEventFd::kind`]: the value is stored in memory, then the descriptor is signalled.
pub const IO_EVENTFD_SHADOW: u32 = 2;

/// A sub-region whose writes can be made through eventfds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IoEventFd {
    /// Bytes from the start of the region.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
    /// Index of the message's descriptor that is signalled.
    pub fd_index: u32,
    /// [`IO_EVENTFD`] or [`IO_EVENTFD_SHADOW`].
    pub kind: u32,
    /// 0.
    pub flags: u32,
    /// Index of the message's descriptor that is the memory.
    pub shadow_fd_index: u32,
    /// Offset of the sub-region in that memory, in bytes.
    pub shadow_offset: u64,
    /// 0: any value.
    pub datamatch: u64,
}
const _: () = assert!(size_of::<IoEventFd>() == 48);

/// Interrupt indexes of a PCI function.
pub mod irq {
    /// The pin.
    pub const INTX: u32 = 0;
    /// Message signalled.
    pub const MSI: u32 = 1;
    /// Message signalled, with a table.
    pub const MSIX: u32 = 2;
    /// Errors.
    pub const ERR: u32 = 3;
    /// The device should be released.
    pub const REQ: u32 = 4;
    /// Number of interrupt indexes.
    pub const COUNT: u32 = 5;
}

/// Flag of [`IrqInfo::flags`]: the interrupt signals event descriptors.
pub const IRQ_EVENTFD: u32 = 1 << 0;
/// Flag of [`IrqInfo::flags`]: the interrupt can be masked.
pub const IRQ_MASKABLE: u32 = 1 << 1;
/// Flag of [`IrqInfo::flags`]: the interrupt masks itself when it fires.
pub const IRQ_AUTOMASKED: u32 = 1 << 2;
/// Flag of [`IrqInfo::flags`]: the interrupts are armed as a set.
pub const IRQ_NORESIZE: u32 = 1 << 3;

/// Payload of DEVICE_GET_IRQ_INFO and of its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IrqInfo {
    /// 16.
    pub argsz: u32,
    /// [`IRQ_EVENTFD`] and the like.
    pub flags: u32,
    /// One of [`irq`].
    pub index: u32,
    /// Interrupts of that type.
    pub count: u32,
}
const _: () = assert!(size_of::<IrqInfo>() == 16);

/// Flag of [`IrqSet::flags`]: there is no data; the action applies to all `count` interrupts.
pub const SET_DATA_NONE: u32 = 1 << 0;
/// Flag of [`IrqSet::flags`]: there is one byte per interrupt, and the action applies to those whose byte is not 0.
pub const SET_DATA_BOOL: u32 = 1 << 1;
/// Flag of [`IrqSet::flags`]: a descriptor per interrupt is sent with the message; without descriptors they are
/// disarmed.
pub const SET_DATA_EVENTFD: u32 = 1 << 2;
/// [`IrqSet::flags`]: masks.
pub const SET_MASK: u32 = 1 << 3;
/// Flag of [`IrqSet::flags`]: unmasks.
pub const SET_UNMASK: u32 = 1 << 4;
/// Flag of [`IrqSet::flags`]: triggers, or arms with [`SET_DATA_EVENTFD`].
pub const SET_TRIGGER: u32 = 1 << 5;

/// Payload of DEVICE_SET_IRQS; the bytes of [`SET_DATA_BOOL`] follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IrqSet {
    /// 20, plus data.
    pub argsz: u32,
    /// One of the data flags and one of the actions.
    pub flags: u32,
    /// One of [`irq`].
    pub index: u32,
    /// First interrupt.
    pub start: u32,
    /// Interrupts; 0 with [`SET_DATA_NONE`] disarms all.
    pub count: u32,
}
const _: () = assert!(size_of::<IrqSet>() == 20);

/// Payload of REGION_READ and REGION_WRITE and of their replies. Data follows in a write and in the
/// reply to a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RegionAccess {
    /// Bytes from the start of the region.
    pub offset: u64,
    /// One of [`region`].
    pub region: u32,
    /// Bytes of data.
    pub count: u32,
}
const _: () = assert!(size_of::<RegionAccess>() == 16);

/// One write of REGION_WRITE_MULTI; their number precedes them as 64 bits, in the reply too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SmallWrite {
    /// Location of the write; `count` is at most 8.
    pub access: RegionAccess,
    /// The bytes written: the first `count` of them.
    pub data: [u8; 8],
}
const _: () = assert!(size_of::<SmallWrite>() == 24);

/// Payload of DMA_READ and DMA_WRITE and of their replies. Data follows in a write and in the reply
/// to a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DmaAccess {
    /// Address inside a mapped range.
    pub address: u64,
    /// Bytes of data.
    pub count: u64,
}
const _: () = assert!(size_of::<DmaAccess>() == 16);
