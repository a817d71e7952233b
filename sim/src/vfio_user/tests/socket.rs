//! The socket file, and clients that come, go and die.

use super::*;
use crate::vfio_user::ServeError;
use std::os::unix::fs::PermissionsExt;
use std::string::ToString;

fn refusal(path: &std::path::Path) -> String {
    match Server::bind(config(), path, 1) {
        Ok(_) => String::new(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn the_socket_is_its_owners_and_goes_with_the_server() {
    let served = ServeOutcome::simple();
    let path = served.path.clone();
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert!(refusal(&path).contains("another server listens"));
    served.stop();
    assert!(!path.exists());
}

#[test]
fn a_path_that_cannot_be_used_is_refused_with_its_remedy() {
    let path = socket_path();
    std::fs::write(&path, "mine").unwrap();
    assert!(refusal(&path).contains("not a socket"));
    assert_eq!(std::fs::read(&path).unwrap(), b"mine", "not touched");
    std::fs::remove_file(&path).unwrap();
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    // The socket of a server that died is replaced.
    assert_eq!(refusal(&path), "");
    assert!(!path.exists(), "it goes with its server");
    assert!(refusal(&path.join("below")).contains("make the folder first"));
    let long = std::env::temp_dir().join("x".repeat(120));
    assert!(refusal(&long).contains("107 bytes"));
    let mut wrong = config();
    wrong.max_queues = 0;
    let error = Server::bind(wrong, &path, 1).err();
    assert!(matches!(error, Some(ServeError::Config(_))), "{error:?}");
    assert!(!path.exists());
}

#[test]
fn a_client_may_die_at_any_byte() {
    let served = ServeOutcome::simple();
    let version = wire::VersionPayload { major: 0, minor: 1 };
    let mut whole = vec![];
    for (code, body) in [
        (command::VERSION, version.as_bytes()),
        (command::REGION_READ, &[0; 16]),
    ] {
        let header = MessageHeader {
            id: 1,
            command: code,
            size: (size_of::<MessageHeader>() + body.len()) as u32,
            flags: 0,
            error: 0,
        };
        whole.extend_from_slice(header.as_bytes());
        whole.extend_from_slice(body);
    }
    for end in 0..=whole.len() {
        served.raw().write_all(&whole[..end]).unwrap();
    }
    let mut last = served.client();
    assert_eq!(last.read32(7, 0) >> 16, 1);
    drop(last);
    let left = served.stop();
    // Connections without a whole message are not clients. The last one may end with the server.
    let first = size_of::<MessageHeader>() + version.as_bytes().len();
    assert!(left.len() >= (first..=whole.len()).count(), "{left:?}");
    // A reply that cannot be sent is a client that has closed.
    assert!(
        left.iter().all(|one| *one == ClientExit::Closed),
        "{left:?}"
    );
}

#[test]
fn a_client_that_loses_the_protocol_is_put_out() {
    let served = ServeOutcome::simple();
    for size in [0, 15, wire::MAX_MESSAGE as u32 + 1, u32::MAX] {
        let mut client = served.client();
        let header = MessageHeader {
            id: 1,
            command: command::DEVICE_RESET,
            size,
            flags: 0,
            error: 0,
        };
        client.put(header, &[], &[]);
        assert_eq!(client.socket.read(&mut [0]).unwrap(), 0, "size {size}");
    }
    let mut client = served.client();
    client.post(command::DEVICE_RESET, 2, &[], &[]);
    assert_eq!(client.socket.read(&mut [0]).unwrap(), 0);
    let mut client = served.client();
    let fd = memfd(4096);
    client.post(command::DEVICE_RESET, 0, &[], &[fd.as_fd(); 70]);
    assert_eq!(
        client.socket.read(&mut [0]).unwrap(),
        0,
        "too many descriptors"
    );
    let left = served.stop();
    assert!(left.len() >= 6);
    assert!(
        left.iter()
            .all(|one| matches!(one, ClientExit::Disconnected(_)))
    );
}

#[test]
fn replies_that_are_not_waited_for_are_dropped() {
    let mut client = ServeOutcome::simple().hold_client();
    for code in [command::DMA_READ, command::VERSION, 77] {
        client.post(code, wire::REPLY, &[1; 40], &[]);
    }
    assert!(client.send(command::DEVICE_RESET, &[], &[]).is_ok());
}

#[test]
fn the_next_client_waits_and_finds_a_reset_function() {
    let served = ServeOutcome::simple();
    let mut first = served.client();
    first.write32(nvme_spec::register::offset::AQA, 0x000F_000F);
    first.write(7, 4, &[6, 0]).unwrap();
    let mut second = Client::new(served.raw());
    second.post(command::VERSION, 0, &[0, 0, 1, 0], &[]);
    drop(first);
    assert_eq!(second.take().0.flags, wire::REPLY);
    assert_eq!(second.read32(0, nvme_spec::register::offset::AQA.into()), 0);
    assert_eq!(second.read(7, 4, 2), Ok(vec![0, 0]));
}

#[test]
fn stopping_does_not_wait_for_the_client() {
    for half in [false, true] {
        let served = ServeOutcome::simple();
        let mut client = served.client();
        if half {
            client.socket.write_all(&[1; 3]).unwrap();
        }
        assert_eq!(served.stop(), []);
        assert!(matches!(client.socket.read(&mut [0]), Ok(0) | Err(_)));
    }
}
