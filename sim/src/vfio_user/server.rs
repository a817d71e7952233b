//! The listening socket and its clients, which are served one after another. The file of the socket
//! is created, checked and removed here; messages are the matter of `session`.

use super::channel::{ConnectionEnd, MessageChannel, ReceivedMessage};
use super::function::PciFunction;
use super::irq::InterruptLines;
use super::requests::ClientRequests;
use super::session::ClientSession;
use super::wire::{self, MessageHeader};
use crate::config::settings::Config;
use crate::controller::Controller;
use crate::event::{EventFd, readable};
use crate::medium::file::CreatedImage;
use crate::memory::HostMemory;
use crate::runner::Runner;
use nvme_spec::register::offset::DOORBELLS;
use rustix::fs::{FlockOperation, Mode, fchmod, flock};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use std::io::{Error as IoError, ErrorKind, Result as IoResult};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::string::{String, ToString};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{format, fs};
use zerocopy::FromBytes;

/// Delay before a client is accepted again after a lack of file descriptors.
const RETRY: Duration = Duration::from_millis(200);
/// Limit of the wait for another server that starts in the same folder.
const FOLDER_LOCK_TIME: Duration = Duration::from_secs(2);
/// Limit of the clients that wait while one is served.
const BACKLOG: i32 = 16;

/// Reason that there is no server.
#[derive(Debug)]
pub enum ServeError {
    /// The configuration of the controller is wrong.
    Config(crate::config::settings::ConfigError),
    /// The path of the socket cannot be used.
    Socket {
        /// The path.
        path: PathBuf,
        /// Cause.
        cause: String,
        /// Remedy.
        remedy: String,
    },
    /// A call of the operating system failed.
    System(&'static str, IoError),
}

impl core::fmt::Display for ServeError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Config(error) => error.fmt(f),
            Self::Socket {
                path,
                cause,
                remedy,
            } => write!(f, "{}: {cause}: {remedy}", path.display()),
            Self::System(what, error) => write!(f, "{what}: {error}"),
        }
    }
}

impl core::error::Error for ServeError {}

/// Ends a [`Server::serve_one`] from another thread.
#[derive(Clone)]
pub struct Stopper(Arc<EventFd>);

impl Stopper {
    /// Makes `serve_one` return soon, even while a client is served.
    pub fn stop(&self) {
        self.0.signal();
    }
}

/// Reason that a client is no longer served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientExit {
    /// The client closed its connection.
    Closed,
    /// The server disconnected the client; the text says what the client did.
    Disconnected(&'static str),
    /// The socket failed.
    Failed(String),
}

/// A controller behind a socket.
///
/// The socket file is created with mode 0600 and removed on drop. One client is served at a time;
/// others wait. When a client leaves, its memory and descriptors are released and the function is
/// reset; the contents of the namespaces stay.
pub struct Server {
    function: PciFunction,
    memory: HostMemory,
    listener: UnixListener,
    path: PathBuf,
    stop: Arc<EventFd>,
}

impl Server {
    /// Makes a controller of `config`, `threads` (at least 1) threads for its queues, and a socket
    /// at `path`. The socket of a server that has ended is replaced; one with a listening server is
    /// not.
    ///
    /// # Errors
    /// [`ServeError`]. Images that were created for `config` are removed then.
    pub fn bind(config: Config, path: &Path, threads: usize) -> Result<Self, ServeError> {
        let created = config.created.clone();
        let server = Self::start(config, path, threads);
        if server.is_err() {
            // An image that was created for this server would be left behind empty.
            created.iter().for_each(CreatedImage::remove);
        }
        server
    }

    fn start(config: Config, path: &Path, threads: usize) -> Result<Self, ServeError> {
        let system = |what| move |error| ServeError::System(what, error);
        let memory = HostMemory::new();
        let irqs = Arc::new(InterruptLines::new(config.vectors));
        let controller = Controller::new(config, memory.clone())
            .map_err(ServeError::Config)?
            .with_shared_doorbells()
            .map_err(system("memory for the doorbells"))?
            .with_interrupts(irqs.clone());
        let controller = Arc::new(controller);
        let runner = Runner::try_start(controller.clone(), threads)
            .map_err(system("a thread for the controller"))?;
        let stop = EventFd::new().map_err(system("an eventfd"))?;
        // The socket comes last: an earlier failure then leaves no socket file behind, and no
        // client can connect before the threads that serve it are running.
        Ok(Self {
            function: PciFunction::new(controller, Arc::new(runner), irqs),
            memory,
            listener: listen_at(path)?,
            path: path.to_owned(),
            stop: Arc::new(stop),
        })
    }

    /// Returns the handle that ends [`serve_one`](Self::serve_one).
    pub fn stopper(&self) -> Stopper {
        Stopper(self.stop.clone())
    }

    /// Returns the controller, for its statistics.
    pub fn controller(&self) -> Arc<Controller<HostMemory>> {
        self.function.controller.clone()
    }

    /// Waits for a client and serves it until it leaves. Returns `None` if the server was stopped.
    /// A connection that closes without a whole message is not a client: a starting server connects
    /// in this way to find out whether another one listens at its path.
    ///
    /// # Errors
    /// The listening socket failed.
    pub fn serve_one(&mut self) -> IoResult<Option<ClientExit>> {
        loop {
            if !readable(self.listener.as_fd(), &self.stop) {
                return Ok(None);
            }
            match self.listener.accept() {
                Ok((socket, _)) => match self.serve_client(socket) {
                    (Some(ClientExit::Closed), 0) => {}
                    (left, _) => return Ok(left),
                },
                // The client has given up before it was accepted.
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                // The process has too few file descriptors at the moment: the client waits until
                // some are free.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                    if self.stop.wait(RETRY) {
                        return Ok(None);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Serves a client whose connection was made without the socket file. Returns `None` if the
    /// server was stopped.
    pub fn serve_connection(&mut self, socket: UnixStream) -> Option<ClientExit> {
        self.serve_client(socket).0
    }

    /// Serves a connection. Returns its end and the number of messages received.
    fn serve_client(&mut self, socket: UnixStream) -> (Option<ClientExit>, u64) {
        let channel = match MessageChannel::new(socket) {
            Ok(channel) => Arc::new(channel),
            Err(error) => return (Some(ClientExit::Failed(error.to_string())), 0),
        };
        let mut messages = 0;
        let requests = Arc::new(ClientRequests::new(Some(channel.clone())));
        let mut session =
            ClientSession::new(&mut self.function, self.memory.clone(), requests.clone());
        loop {
            let result = channel.receive(&self.stop).and_then(|message| {
                messages += 1;
                answer_message(&channel, &requests, &mut session, message)
            });
            let left = match result {
                Ok(()) => continue,
                Err(ConnectionEnd::Stopped) => None,
                Err(ConnectionEnd::Closed) => Some(ClientExit::Closed),
                Err(ConnectionEnd::ProtocolError(what)) => Some(ClientExit::Disconnected(what)),
                Err(ConnectionEnd::Failed(errno)) => Some(ClientExit::Failed(errno.to_string())),
            };
            return (left, messages);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Answers one message, or passes a reply to the thread that waits for it.
fn answer_message(
    channel: &MessageChannel,
    requests: &ClientRequests,
    session: &mut ClientSession<'_>,
    message: ReceivedMessage,
) -> Result<(), ConnectionEnd> {
    let ReceivedMessage { header, body, fds } = message;
    match header.flags & wire::TYPE_MASK {
        wire::COMMAND => {}
        wire::REPLY => {
            requests.reply(&header, body);
            return Ok(());
        }
        _ => {
            return Err(ConnectionEnd::ProtocolError(
                "a message that is neither command nor reply",
            ));
        }
    }
    // The command may wait for the controller's threads, and these may wait for this thread to
    // receive a reply: while it is busy, their requests fail early instead of deadlocking with it.
    requests.set_busy(!is_doorbell(header.command, &body));
    let result = session.answer(header.command, &body, fds);
    requests.set_busy(false);
    if header.flags & wire::NO_REPLY == 0 {
        let reply = MessageHeader {
            id: header.id,
            command: header.command,
            size: size_of::<MessageHeader>() as u32,
            flags: wire::REPLY,
            error: 0,
        };
        match &result {
            Ok(answer) => {
                let size = reply.size + answer.body.len() as u32;
                let fds: std::vec::Vec<_> = answer.fds.iter().map(AsFd::as_fd).collect();
                channel.send(MessageHeader { size, ..reply }, &answer.body, &fds)?;
            }
            Err(errno) => {
                let (flags, error) = (reply.flags | wire::ERROR, errno.raw_os_error() as u32);
                channel.send(
                    MessageHeader {
                        flags,
                        error,
                        ..reply
                    },
                    &[],
                    &[],
                )?;
            }
        }
    }
    if !session.is_negotiated() {
        return Err(ConnectionEnd::ProtocolError("no common version"));
    }
    if session.has_lost_memory() {
        return Err(ConnectionEnd::ProtocolError(
            "it shortened memory that it had given",
        ));
    }
    Ok(())
}

/// True if a message rings a doorbell. That never waits for the controller, so accesses of the
/// controller need not be cut short however long this thread is preempted.
fn is_doorbell(code: u16, body: &[u8]) -> bool {
    let access = wire::RegionAccess::read_from_prefix(body);
    let is_one = |access: wire::RegionAccess| {
        access.region == wire::region::BAR0 && access.offset >= u64::from(DOORBELLS)
    };
    code == wire::command::REGION_WRITE && access.is_ok_and(|(access, _)| is_one(access))
}

/// Makes a listening socket at `path`. At no moment can another user than the owner connect to it.
fn listen_at(path: &Path) -> Result<UnixListener, ServeError> {
    let refused = |cause: &str, remedy: String| ServeError::Socket {
        path: path.to_owned(),
        cause: cause.into(),
        remedy,
    };
    let another = || "choose another path".to_owned();
    // Two servers that start at once would both find no socket. Under the folder's lock, the second
    // finds the socket of the first. Without it both would replace the other's socket.
    let _folder_lock = lock_folder(path).map_err(|errno| {
        let cause = format!("the folder stays locked: {}", IoError::from(errno));
        refused(
            &cause,
            "end what is starting there, or choose another folder".into(),
        )
    })?;
    if let Ok(found) = fs::symlink_metadata(path) {
        if !found.file_type().is_socket() {
            return Err(refused("exists and is not a socket", another()));
        }
        match is_dead(path) {
            Ok(true) => fs::remove_file(path).map_err(|error| {
                let cause =
                    format!("cannot replace the socket of a server that has ended: {error}");
                refused(&cause, another())
            })?,
            Ok(false) => return Err(refused("another server listens there", another())),
            Err(errno) => {
                let cause = format!(
                    "exists and cannot be asked for its server: {}",
                    IoError::from(errno)
                );
                return Err(refused(&cause, another()));
            }
        }
    }
    let listening = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        // The socket gets its mode before bind, which creates the file with that mode. A chmod
        // after bind would leave a moment in which any user could connect.
        fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
        bind(&socket, &SocketAddrUnix::new(path)?)?;
        listen(&socket, BACKLOG)?;
        Ok(UnixListener::from(socket))
    };
    listening().map_err(|errno: Errno| {
        let remedy = match errno {
            Errno::NAMETOOLONG => "use a path of at most 107 bytes",
            Errno::NOENT => "make the folder first",
            Errno::ACCESS | Errno::PERM | Errno::ROFS => "choose a folder that you may write to",
            _ => "choose another path",
        };
        refused(&IoError::from(errno).to_string(), remedy.into())
    })
}

/// Locks the folder of `path`. A folder that cannot be opened or locked needs no lock: binding then
/// reports its error.
fn lock_folder(path: &Path) -> Result<Option<fs::File>, Errno> {
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    let Ok(folder) = fs::File::open(folder.unwrap_or(Path::new("."))) else {
        return Ok(None);
    };
    let begin = Instant::now();
    loop {
        match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Some(folder)),
            Err(Errno::WOULDBLOCK | Errno::INTR) if begin.elapsed() < FOLDER_LOCK_TIME => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(Errno::WOULDBLOCK | Errno::INTR) => return Err(Errno::WOULDBLOCK),
            Err(_) => return Ok(None),
        }
    }
}

/// True if no process listens at the socket `path`. Does not wait for one that is slow to accept.
fn is_dead(path: &Path) -> Result<bool, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match connect(&socket, &SocketAddrUnix::new(path)?) {
        // A full backlog belongs to a live server.
        Ok(()) | Err(Errno::AGAIN | Errno::INPROGRESS) => Ok(false),
        Err(Errno::CONNREFUSED) => Ok(true),
        Err(errno) => Err(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvme_spec::register::offset;
    use zerocopy::IntoBytes;

    #[test]
    fn only_a_doorbell_waits_for_no_reply() {
        let write = |region, offset: u32| {
            let access = wire::RegionAccess {
                offset: offset.into(),
                region,
                count: 4,
            };
            is_doorbell(wire::command::REGION_WRITE, access.as_bytes())
        };
        assert!(write(wire::region::BAR0, DOORBELLS) && write(wire::region::BAR0, DOORBELLS + 4));
        assert!(!write(wire::region::BAR0, offset::CC));
        assert!(!write(7, DOORBELLS), "configuration space");
        assert!(!is_doorbell(wire::command::REGION_READ, &[0xFF; 16]));
        assert!(!is_doorbell(wire::command::REGION_WRITE, &[0; 4]));
    }
}
