//! Peers that say what no version of this package says, over sockets of the test.

use crate::{Gate, PAGE, SLOTS, Scratch, load, request, shared, store};
use nvme_kv::StoreOutcome;
use nvme_kv_server::message::{
    AreaHello, KeyBytes, MOST_KEYS, MOST_MESSAGE, PacketHeader, PageOffer, PageReply, PageRequest,
    decode, encode,
};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, recvmsg, sockopt,
};
use std::io::{BufRead, BufReader, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

const FIRST: PacketHeader = PacketHeader {
    epoch: 0,
    sequence: 0,
};

fn new_socket() -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
}

/// A client without any check.
struct RawClient {
    socket: OwnedFd,
    window: Option<OwnedFd>,
}

impl RawClient {
    fn new(scratch: &Scratch) -> Self {
        let sockets = std::fs::read_dir(scratch.0.join("sockets")).unwrap();
        let mut paths = sockets.map(|entry| entry.unwrap().path());
        let path = paths.find(|path| path.extension().is_some_and(|one| one == "sock"));
        Self::at(&path.unwrap())
    }

    fn at(path: &Path) -> Self {
        let socket = new_socket();
        let limit = Some(Duration::from_secs(60));
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, limit).unwrap();
        rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        Self {
            socket,
            window: None,
        }
    }

    fn send(&self, bytes: &[u8]) {
        // The owner may have closed its side.
        let _ = rustix::net::send(&self.socket, bytes, SendFlags::NOSIGNAL);
    }

    /// The next message; empty if the owner has closed the connection.
    fn receive(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; MOST_MESSAGE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let got = recvmsg(
            &self.socket,
            &mut parts,
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        );
        let length = match got {
            Ok(got) => got.bytes,
            Err(rustix::io::Errno::CONNRESET) => 0,
            Err(error) => panic!("{error}"),
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(mut files) = message {
                self.window = files.next();
            }
        }
        bytes.truncate(length);
        bytes
    }

    fn ask(
        &mut self,
        header: PacketHeader,
        request: &PageRequest,
    ) -> Option<(PacketHeader, PageReply)> {
        self.send(&encode(header, request));
        let bytes = self.receive();
        (!bytes.is_empty()).then(|| decode(&bytes).unwrap())
    }

    /// A client that was greeted; the header of its next request.
    fn greeted(scratch: &Scratch) -> (Self, PacketHeader) {
        let mut client = Self::new(scratch);
        match client.ask(FIRST, &PageRequest::Hello(hello(&scratch.0))) {
            Some((PacketHeader { epoch, .. }, PageReply::Welcome(_))) => {
                (client, PacketHeader { epoch, sequence: 1 })
            }
            other => panic!("{other:?}"),
        }
    }
}

fn hello(folder: &Path) -> AreaHello {
    AreaHello {
        bytes: None,
        page_bytes: PAGE as u32,
        fingerprint: request(folder, "llama").fingerprint.encode().unwrap(),
    }
}

fn refusal(reply: Option<(PacketHeader, PageReply)>) -> String {
    match reply {
        Some((_, PageReply::Refused(error))) => {
            let error = error.to_error();
            format!("{}: {error}", error.code())
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn clients_of_another_version_or_size_are_refused_by_name() {
    let scratch = Scratch::new();
    let pages = shared(request(&scratch.0, "llama"), Arc::new(Gate::default())).unwrap();
    let mut later = encode(FIRST, &PageRequest::Hello(hello(&scratch.0)));
    later[8] += 1;
    let mut client = RawClient::new(&scratch);
    client.send(&later);
    let reply = decode(&client.receive()).unwrap();
    let said = refusal(Some(reply));
    assert!(
        said.starts_with("mismatch: ") && said.contains("version 2"),
        "{said}"
    );
    assert!(client.receive().is_empty());
    for (change, word) in [
        (
            (|one| one.page_bytes += 1) as fn(&mut AreaHello),
            "page_bytes",
        ),
        (|one| one.bytes = Some(1 << 30), "area_bytes"),
        (|one| one.fingerprint.push(0), "fingerprint"),
    ] {
        let mut other = hello(&scratch.0);
        change(&mut other);
        let said = refusal(RawClient::new(&scratch).ask(FIRST, &PageRequest::Hello(other)));
        assert!(said.contains(word), "{said}");
    }
    assert_eq!(store(&pages, 1).unwrap(), StoreOutcome::Stored);
}

/// Environment of a process of another user: what it does, and at which socket.
const OTHER_ROLE: &str = "NVME_KV_OTHER_ROLE";
const OTHER_SOCKET: &str = "NVME_KV_OTHER_SOCKET";
const OTHER_MARK: &str = "other: ";

/// This program once more as another user, at `socket`; returns it with what it says. `None` where this user may not
/// become one.
fn another_user(scratch: &Scratch, role: &str, socket: &Path) -> Option<(Child, String)> {
    // The folder of the build may be closed to others.
    let program = scratch.0.join("other");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let started = Command::new(program)
        .args([
            "--exact",
            "peers::another_user_obeys_its_test",
            "--nocapture",
        ])
        .uid(65_534)
        .gid(65_534)
        .env(OTHER_ROLE, role)
        .env(OTHER_SOCKET, socket)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        // The runner of tests complains when nothing reads its last lines.
        .stderr(Stdio::null())
        .spawn();
    let mut other = match started {
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => return None,
        started => started.unwrap(),
    };
    let lines = BufReader::new(other.stdout.take().unwrap()).lines();
    let said = lines
        .map_while(Result::ok)
        .find_map(|line| Some(line.split_once(OTHER_MARK)?.1.to_owned()));
    Some((other, said.expect("the other user says what it saw")))
}

/// Does nothing in a run of the tests; it is what [`another_user`] starts.
#[test]
fn another_user_obeys_its_test() {
    let Some(socket) = std::env::var_os(OTHER_SOCKET) else {
        return;
    };
    let socket = Path::new(&socket);
    if std::env::var(OTHER_ROLE).as_deref() == Ok("client") {
        let mut client = RawClient::at(socket);
        let reply = client.ask(FIRST, &PageRequest::Hello(hello(socket)));
        return println!("{OTHER_MARK}{}", reply.is_some() || client.window.is_some());
    }
    let listener = new_socket();
    rustix::net::bind(&listener, &SocketAddrUnix::new(socket).unwrap()).unwrap();
    rustix::net::listen(&listener, 8).unwrap();
    println!("{OTHER_MARK}listens");
    // Until the test ends it.
    let _ = std::io::stdin().read(&mut [0]);
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
}

/// Needs root to become another user; without it nothing is tested, which it says.
#[test]
fn a_client_and_an_owner_of_another_user_are_refused() {
    let scratch = Scratch::new();
    let pages = shared(request(&scratch.0, "llama"), Arc::new(Gate::default())).unwrap();
    let sockets = scratch.0.join("sockets");
    let all = |folder: &Path| {
        let found = std::fs::read_dir(folder).unwrap();
        found.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
    };
    let mut socket = all(&sockets);
    socket.retain(|path| path.extension().is_some_and(|one| one == "sock"));
    let socket = socket.remove(0);
    // Doors that the package keeps shut: the check of the user is behind them.
    set_mode(&sockets, 0o755);
    set_mode(&socket, 0o777);
    let Some((mut client, is_answered)) = another_user(&scratch, "client", &socket) else {
        return eprintln!("skipped: cannot become another user here");
    };
    client.wait().unwrap();
    assert_eq!(is_answered, "false");
    assert_eq!(store(&pages, 1).unwrap(), StoreOutcome::Stored);
    RawClient::greeted(&scratch);
    // Another user's socket in place of the owner's.
    let theirs = scratch.0.join("theirs");
    std::fs::create_dir(&theirs).unwrap();
    set_mode(&theirs, 0o777);
    let (mut owner, said) = another_user(&scratch, "owner", &theirs.join("socket")).unwrap();
    assert_eq!(said, "listens");
    std::fs::rename(theirs.join("socket"), &socket).unwrap();
    set_mode(&sockets, 0o700);
    let error = shared(request(&scratch.0, "llama"), Arc::new(Gate::default())).err();
    let error = error.expect("the owner is another user's");
    assert_eq!(error.code(), "system", "{error}");
    assert!(error.to_string().contains("another user"), "{error}");
    owner.kill().unwrap();
    owner.wait().unwrap();
    load(&pages, 1).unwrap();
}

#[test]
fn garbage_ends_its_connection_and_nothing_else() {
    let scratch = Scratch::new();
    let pages = shared(request(&scratch.0, "llama"), Arc::new(Gate::default())).unwrap();
    let (mut good, header) = RawClient::greeted(&scratch);
    let mut random = 1u64;
    for length in [
        0,
        1,
        8,
        11,
        12,
        13,
        40,
        1000,
        MOST_MESSAGE,
        MOST_MESSAGE + 1,
        2 * MOST_MESSAGE,
    ] {
        let byte = |_| {
            random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
            (random >> 40) as u8
        };
        let garbage: Vec<u8> = (0..length).map(byte).collect();
        let client = RawClient::new(&scratch);
        client.send(&garbage);
        let (mut client, _) = RawClient::greeted(&scratch);
        client.send(&garbage);
        // An error, then the end; or the end at once.
        assert!(client.receive().is_empty() || client.receive().is_empty());
    }
    // Lists that are too long, and pages that are.
    let offer = |length| PageOffer {
        key: [1; 16],
        length,
        checksum: 0,
    };
    let keys: Vec<KeyBytes> = vec![[7; 16]; MOST_KEYS + 1];
    for request in [
        PageRequest::Lengths(keys.clone()),
        PageRequest::Load(keys[..257].to_vec()),
        PageRequest::Store(vec![offer(PAGE as u32 + 1)]),
    ] {
        let (mut client, header) = RawClient::greeted(&scratch);
        let said = refusal(client.ask(header, &request));
        assert!(said.contains("too long"), "{said}");
        assert!(client.receive().is_empty());
    }
    // A client that connects and says nothing is not waited for, and one that is in the middle of its work goes on.
    let _silent = RawClient::new(&scratch);
    let reply = good.ask(header, &PageRequest::Lengths(vec![[7; 16]]));
    assert_eq!(reply, Some((header, PageReply::Lengths(vec![0]))));
    assert_eq!(store(&pages, 1).unwrap(), StoreOutcome::Stored);
    load(&pages, 1).unwrap();
}

#[test]
fn requests_to_another_opening_and_pages_that_changed_are_refused() {
    let scratch = Scratch::new();
    let pages = shared(request(&scratch.0, "llama"), Arc::new(Gate::default())).unwrap();
    let (mut client, header) = RawClient::greeted(&scratch);
    let old = PacketHeader {
        epoch: header.epoch - 1,
        ..header
    };
    let key = *pages.key(&5u64.to_le_bytes(), 0).as_bytes();
    for request in [
        PageRequest::Load(vec![key]),
        PageRequest::Clear,
        PageRequest::Stats,
    ] {
        let said = refusal(client.ask(old, &request));
        assert!(said.starts_with("changed: "), "{said}");
    }
    let said = refusal(client.ask(header, &PageRequest::Hello(hello(&scratch.0))));
    assert!(said.contains("greets twice"), "{said}");
    // The window is all zeros, and the checksum that of something else.
    let offer = PageOffer {
        key,
        length: 100,
        checksum: 1,
    };
    match client.ask(header, &PageRequest::Store(vec![offer])) {
        Some((_, PageReply::Stored(_, errors))) => {
            let error = errors[0].to_error().to_string();
            assert!(error.contains("not the one that is offered"), "{error}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(pages.lengths(&[nvme_kv::PageKey::of_bytes(key)]), [None]);
    // A client cannot make its window smaller, so that the owner would read what is not there.
    let window = client.window.take().unwrap();
    assert!(rustix::fs::ftruncate(&window, 0).is_err());
}

#[test]
fn a_full_area_makes_room_and_pinned_pages_stay() {
    let scratch = Scratch::new();
    let owner = shared(request(&scratch.0, "llama"), Arc::new(Gate::default())).unwrap();
    let client = shared(request(&scratch.0, "llama"), Arc::new(Gate::default())).unwrap();
    assert!(owner.owner().unwrap().0 && !client.owner().unwrap().0);
    let key = |number: u64| client.key(&number.to_le_bytes(), 0);
    for number in 0..3 * SLOTS {
        assert_eq!(store(&client, number).unwrap(), StoreOutcome::Stored);
    }
    let stats = client.stats().unwrap();
    assert_eq!(stats, owner.stats().unwrap());
    assert!(stats.pages <= SLOTS && stats.evicted >= 2 * SLOTS);
    let found: Vec<u64> = (0..3 * SLOTS)
        .filter(|number| client.lengths(&[key(*number)])[0].is_some())
        .collect();
    let mut pins: Vec<_> = found
        .iter()
        .map(|number| client.pin_prefix(&[key(*number)]))
        .collect();
    let mut number = 1000;
    loop {
        match store(&client, number).unwrap() {
            StoreOutcome::Stored => pins.push(client.pin_prefix(&[key(number)])),
            outcome => break assert_eq!(outcome, StoreOutcome::NoRoom),
        }
        number += 1;
    }
    assert_eq!(
        pins.iter()
            .map(nvme_kv_server::SharedPins::len)
            .sum::<usize>() as u64,
        SLOTS
    );
    drop(pins);
    assert_eq!(store(&client, 2000).unwrap(), StoreOutcome::Stored);
    let layout = client.area().unwrap().0;
    assert_eq!(
        (u64::from(layout.slots), layout.page_bytes as usize),
        (SLOTS, PAGE)
    );
    assert_eq!(
        client.remove(&[key(2000), key(2000), key(9999)]).unwrap(),
        1
    );
    client.clear().unwrap();
    client.checkpoint().unwrap();
    assert_eq!(owner.stats().unwrap().pages, 0);
}
