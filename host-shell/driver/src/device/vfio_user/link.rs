//! Requests to a server that may leave at any moment: the connection, and why it ended.
//!
//! Invariant: the first fault that ends the connection is its cause for good; the socket is closed with
//! it, and nothing is sent afterwards.

use super::connection::{LONGEST, MAX_FDS, RequestFault, ServerConnection, ServerReply};
use super::region::{self, ServerRegion};
use crate::error::{Error, Result};
use crate::lock::lock;
use nvme_vfio_user::{
    DeviceInfo, MAJOR, MAX_TRANSFER, MINOR, PeerCapabilities, RegionAccess, RegionInfo,
    VersionData, VersionPayload, command,
};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Mutex, OnceLock};
use zerocopy::{FromBytes, IntoBytes};

/// Cause of a request's failure; the link keeps the cause of a lost connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkFailure {
    /// The server refused it, with this error number.
    Refused(i32),
    /// There is no connection any more.
    Gone,
}

/// The connection to one server, for all threads.
pub(super) struct ServerLink {
    name: String,
    connection: Mutex<Option<ServerConnection>>,
    cause: OnceLock<String>,
}

impl ServerLink {
    pub fn new(name: String, connection: ServerConnection) -> Self {
        Self {
            name,
            connection: Mutex::new(Some(connection)),
            cause: OnceLock::new(),
        }
    }

    /// Returns the device's name, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the reason why the connection ended, once it did.
    pub fn gone(&self) -> Option<String> {
        self.cause
            .get()
            .map(|cause| format!("{}: {cause}", self.name))
    }

    /// Ends the connection; the first cause counts.
    pub fn break_off(&self, cause: impl Into<String>) -> LinkFailure {
        // Losing the race means that there is a cause already.
        let _ = self.cause.set(cause.into());
        lock(&self.connection).take();
        LinkFailure::Gone
    }

    /// Returns the error for the caller who requested `what`.
    pub fn error(&self, what: &str, failed: LinkFailure) -> Error {
        match failed {
            LinkFailure::Refused(errno) => Error::device(
                format!(
                    "{}: the server refused {what}: {}",
                    self.name,
                    in_words(errno)
                ),
                "see the server's messages",
            ),
            LinkFailure::Gone => Error::Gone {
                cause: self.gone().unwrap_or_else(|| self.name.clone()),
            },
        }
    }

    fn request(
        &self,
        command: u16,
        payload: &[u8],
        file: Option<BorrowedFd<'_>>,
    ) -> std::result::Result<ServerReply, LinkFailure> {
        let answer = match lock(&self.connection).as_mut() {
            Some(connection) => connection.request(command, payload, file),
            None => return Err(LinkFailure::Gone),
        };
        answer.map_err(|fault| match fault {
            RequestFault::Refused(errno) => LinkFailure::Refused(errno),
            RequestFault::Broken(cause) => self.break_off(cause),
        })
    }

    /// Negotiates a version and returns the server's limits.
    pub fn negotiate(&self) -> Result<PeerCapabilities> {
        let version = VersionPayload {
            major: MAJOR,
            minor: MINOR,
        };
        let ours = VersionData {
            capabilities: PeerCapabilities {
                max_msg_fds: Some(MAX_FDS as u64),
                max_data_xfer_size: Some(u64::from(MAX_TRANSFER)),
                ..PeerCapabilities::default()
            },
        };
        let mut payload = version.as_bytes().to_vec();
        payload.extend(serde_json::to_vec(&ours).unwrap_or_default());
        payload.push(0);
        let what = "to agree on a version";
        let reply = self
            .request(command::VERSION, &payload, None)
            .map_err(|failed| self.error(what, failed))?;
        let unfit = |cause: String| {
            Error::device(
                format!("{}: {cause}", self.name),
                "use a server that speaks vfio-user 0.1",
            )
        };
        let Ok((version, data)) = VersionPayload::read_from_prefix(&reply.payload) else {
            return Err(unfit("the server's version is cut off".to_owned()));
        };
        if version.major != MAJOR || version.minor > MINOR {
            let VersionPayload { major, minor } = version;
            return Err(unfit(format!("the server speaks version {major}.{minor}")));
        }
        let text = data.strip_suffix(&[0]).unwrap_or(data);
        if text.is_empty() {
            return Ok(PeerCapabilities::default());
        }
        let data: VersionData = serde_json::from_slice(text)
            .map_err(|error| unfit(format!("the server's capabilities make no sense: {error}")))?;
        Ok(data.capabilities)
    }

    /// Flags and number of regions.
    pub fn device_info(&self) -> Result<DeviceInfo> {
        let asked = DeviceInfo {
            argsz: size_of::<DeviceInfo>() as u32,
            flags: 0,
            num_regions: 0,
            num_irqs: 0,
        };
        let what = "to describe the device";
        let reply = self
            .request(command::DEVICE_GET_INFO, asked.as_bytes(), None)
            .map_err(|failed| self.error(what, failed))?;
        let info = DeviceInfo::read_from_prefix(&reply.payload).map(|(info, _)| info);
        info.map_err(|_| {
            self.break_off("the description of the device is cut off");
            self.error(what, LinkFailure::Gone)
        })
    }

    /// Queries region `index`, and the descriptor by which it can be mapped.
    pub fn region(&self, index: u32) -> Result<(ServerRegion, Option<OwnedFd>)> {
        let what = format!("to describe region {index}");
        let mut room = size_of::<RegionInfo>();
        let mut files = Vec::new();
        let reply = loop {
            let asked = RegionInfo {
                argsz: room as u32,
                flags: 0,
                index,
                cap_offset: 0,
                size: 0,
                offset: 0,
            };
            let reply = self
                .request(command::DEVICE_GET_REGION_INFO, asked.as_bytes(), None)
                .map_err(|failed| self.error(&what, failed))?;
            // A descriptor may come with the first answer, the second, or both: the last one counts.
            files.extend(reply.files);
            // Some servers set the flag of capabilities only if the capabilities fit into the reply.
            let info = RegionInfo::read_from_prefix(&reply.payload);
            let needed = info.map_or(0, |(info, _)| info.argsz as usize);
            if needed <= reply.payload.len() {
                break reply.payload;
            }
            if needed <= room || needed > LONGEST {
                self.break_off(format!("region {index} takes {needed} bytes to describe"));
                return Err(self.error(&what, LinkFailure::Gone));
            }
            room = needed;
        };
        let region = region::parse(index, &reply).map_err(|cause| {
            self.break_off(format!("region {index} has {cause}"));
            self.error(&what, LinkFailure::Gone)
        })?;
        Ok((region, files.pop()))
    }

    /// Reads `N` bytes at `offset` of region `region`.
    pub fn read<const N: usize>(
        &self,
        region: u32,
        offset: u64,
    ) -> std::result::Result<[u8; N], LinkFailure> {
        let asked = RegionAccess {
            offset,
            region,
            count: N as u32,
        };
        let reply = self.request(command::REGION_READ, asked.as_bytes(), None)?;
        let head = RegionAccess::read_from_prefix(&reply.payload);
        let data = head.ok().filter(|(head, _)| head.count == N as u32);
        data.and_then(|(_, data)| data.try_into().ok())
            .ok_or_else(|| {
                let bytes = reply.payload.len();
                self.break_off(format!("{bytes} bytes of reply to a read of {N} bytes"))
            })
    }

    /// Writes `data` at `offset` of region `region`.
    pub fn write(
        &self,
        region: u32,
        offset: u64,
        data: &[u8],
    ) -> std::result::Result<(), LinkFailure> {
        let count = data.len() as u32;
        let head = RegionAccess {
            offset,
            region,
            count,
        };
        let payload = [head.as_bytes(), data].concat();
        let reply = self.request(command::REGION_WRITE, &payload, None)?;
        match RegionAccess::read_from_bytes(&reply.payload) {
            Ok(head) if head.count == count => Ok(()),
            _ => Err(self.break_off(format!("a write of {count} bytes was not confirmed"))),
        }
    }

    /// Sends `command`, whose reply has no content that is used.
    pub fn tell(
        &self,
        command: u16,
        payload: &[u8],
        file: Option<BorrowedFd<'_>>,
    ) -> std::result::Result<(), LinkFailure> {
        self.request(command, payload, file).map(drop)
    }
}

/// Returns an error number of the server's.
pub(super) fn in_words(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}
