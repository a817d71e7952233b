//! The client's memory: maps, unmaps, and memory that is reached by messages.

use super::controller::{BASE, BYTES};
use super::*;
use nvme_spec::register::{Cc, offset};
use nvme_spec::{Cid, Nsid, admin};
use std::time::Instant;

const INVAL: i32 = libc::EINVAL;

fn map(client: &mut Client, map: wire::DmaMap, fds: &[BorrowedFd<'_>]) -> i32 {
    match client.send(command::DMA_MAP, map.as_bytes(), fds) {
        Ok(_) => 0,
        Err(errno) => errno,
    }
}

#[test]
fn ranges_do_not_overlap_and_lie_in_their_file() {
    let mut client = ServeOutcome::simple().hold_client();
    let fd = memfd(16 << 10);
    let good = wire::DmaMap {
        argsz: 32,
        flags: 3,
        offset: 0,
        address: 0x4000,
        size: 0x4000,
    };
    assert_eq!(map(&mut client, good, &[fd.as_fd()]), 0);
    let bad = [
        (
            wire::DmaMap {
                address: 0x7FF8,
                ..good
            },
            libc::EEXIST,
        ),
        (
            wire::DmaMap {
                address: 0x0001,
                size: 0x4000,
                ..good
            },
            libc::EEXIST,
        ),
        (
            wire::DmaMap {
                address: 0,
                size: u64::MAX,
                ..good
            },
            libc::EEXIST,
        ),
        (
            wire::DmaMap {
                address: 0x1_0000,
                size: 0,
                ..good
            },
            INVAL,
        ),
        (
            wire::DmaMap {
                address: u64::MAX - 1,
                ..good
            },
            INVAL,
        ),
        (
            wire::DmaMap {
                address: 0x1_0000,
                flags: 8,
                ..good
            },
            INVAL,
        ),
        (
            wire::DmaMap {
                address: 0x1_0000,
                offset: 1 << 12,
                ..good
            },
            INVAL,
        ),
        (
            wire::DmaMap {
                address: 0x1_0000,
                offset: u64::MAX,
                ..good
            },
            INVAL,
        ),
        (
            wire::DmaMap {
                address: 0x1_0000,
                size: 0x4001,
                ..good
            },
            INVAL,
        ),
        (
            wire::DmaMap {
                address: 0x1_0001,
                size: 0x1000,
                ..good
            },
            INVAL,
        ),
    ];
    for (i, (one, errno)) in bad.into_iter().enumerate() {
        assert_eq!(map(&mut client, one, &[fd.as_fd()]), errno, "case {i}");
    }
    let other = wire::DmaMap {
        address: 0x1_0000,
        ..good
    };
    assert_eq!(map(&mut client, other, &[fd.as_fd(), fd.as_fd()]), INVAL);
    let part = wire::DmaMap {
        offset: 0x2000,
        size: 0x1000,
        ..other
    };
    assert_eq!(map(&mut client, part, &[fd.as_fd()]), 0);
    // What is not memory is refused, and its descriptor closed.
    let (mut reader, writer) = std::io::pipe().unwrap();
    let third = wire::DmaMap {
        address: 0x2_0000,
        ..good
    };
    assert_eq!(map(&mut client, third, &[writer.as_fd()]), INVAL);
    drop(writer);
    assert_eq!(reader.read(&mut [0]).unwrap(), 0);
}

#[test]
fn unmapping_takes_whole_ranges() {
    let mut client = ServeOutcome::simple().hold_client();
    let fd = memfd(16 << 10);
    for address in [0x1000, 0x2000, 0x8000] {
        client.map(address, 0x1000, Some(&fd)).unwrap();
    }
    for (flags, address, size, errno) in [
        (0, 0x1000, 0x800, INVAL),
        (0, 0x1800, 0x800, INVAL),
        (0, 0x800, 0x1000, INVAL),
        (0, 0x1000, 0x1800, INVAL),
        (0, 0x1000, 0, INVAL),
        (0, 0x3000, 0x1000, libc::ENOENT),
        (0, u64::MAX, 2, INVAL),
        (wire::UNMAP_DIRTY_BITMAP, 0x1000, 0x1000, libc::EOPNOTSUPP),
        (wire::UNMAP_ALL, 0x1000, 0x1000, INVAL),
        (4, 0x1000, 0x1000, INVAL),
    ] {
        let refused = client.unmap(flags, address, size);
        assert_eq!(refused, Err(errno), "{flags} {address:x} {size:x}");
    }
    // One message may cover several ranges: a client's IOMMU invalidates more than was mapped.
    assert_eq!(client.unmap(0, 0, 0x4000), Ok(()));
    assert_eq!(client.unmap(0, 0x1000, 0x1000), Err(libc::ENOENT));
    assert_eq!(client.unmap(wire::UNMAP_ALL, 0, 0), Ok(()));
    assert_eq!(client.unmap(0, 0x8000, 0x1000), Err(libc::ENOENT));
    assert_eq!(
        client.unmap(wire::UNMAP_ALL, 0, 0),
        Ok(()),
        "nothing is left to unmap"
    );
}

/// A client whose memory has no descriptor: it answers the controller's requests itself.
struct RemoteMemory<'a> {
    client: &'a mut Client,
    memory: Vec<u8>,
    reads: usize,
    writes: Vec<(u64, usize)>,
}

impl RemoteMemory<'_> {
    /// Answers the next request; panics if another message arrives.
    fn answer(&mut self) {
        let (header, body, _) = self.client.take();
        assert_eq!(header.flags, wire::COMMAND);
        let (access, data) = wire::DmaAccess::read_from_prefix(&body).unwrap();
        let start = (access.address - BASE) as usize;
        let range = start..start + access.count as usize;
        let mut reply = access.as_bytes().to_vec();
        match header.command {
            command::DMA_READ => {
                self.reads += 1;
                reply.extend_from_slice(&self.memory[range]);
            }
            command::DMA_WRITE => {
                self.writes.push((access.address, data.len()));
                self.memory[range].copy_from_slice(data);
            }
            other => panic!("command {other}"),
        }
        let size = (size_of::<MessageHeader>() + reply.len()) as u32;
        let flags = wire::REPLY;
        self.client.put(
            MessageHeader {
                size,
                flags,
                ..header
            },
            &reply,
            &[],
        );
    }
}

fn enable(client: &mut Client) {
    client.write32(offset::AQA, 0x000F_000F);
    client
        .write(0, offset::ASQ.into(), &BASE.to_le_bytes())
        .unwrap();
    let cq = BASE + 0x1000;
    client
        .write(0, offset::ACQ.into(), &cq.to_le_bytes())
        .unwrap();
    let mut cc = Cc(0);
    cc.set_iosqes(6);
    cc.set_iocqes(4);
    cc.set_en(true);
    client.write32(offset::CC, cc.0);
}

fn identify(data: u64) -> Vec<u8> {
    let sqe = admin::identify(admin::cns::CONTROLLER, Nsid::NONE)
        .with_prps(data, 0)
        .with_cid(Cid(0));
    sqe.to_words().map(u64::to_le_bytes).concat()
}

#[test]
fn memory_without_a_descriptor_is_reached_by_messages_data_before_completion() {
    let served = ServeOutcome::simple();
    let mut client = Client::new(served.raw());
    client.greet(r#"{"capabilities":{"max_data_xfer_size":1024}}"#);
    client.map(BASE, BYTES, None).unwrap();
    enable(&mut client);
    let mut memory = vec![0; BYTES as usize];
    memory[..64].copy_from_slice(&identify(BASE + 0x2000));
    client.post(command::REGION_WRITE, wire::NO_REPLY, &doorbell(1), &[]);
    let mut remote = RemoteMemory {
        client: &mut client,
        memory,
        reads: 0,
        writes: vec![],
    };
    while remote.memory[0x100F] == 0 && remote.memory[0x100E] & 1 == 0 {
        remote.answer();
    }
    assert_eq!(
        remote.memory[0x2000..0x2002],
        crate::command::identify::PCI_VENDOR.to_le_bytes()
    );
    assert_eq!(remote.memory[0x100E..0x1010], [1, 0], "success, phase 1");
    let (last, before) = remote.writes.split_last().unwrap();
    assert!((BASE + 0x1000..BASE + 0x1010).contains(&last.0));
    assert!(before.iter().all(|(at, _)| *at >= BASE + 0x2000));
    assert!(remote.writes.iter().all(|(_, len)| *len <= 1024));
    assert!(remote.reads >= 4);
}

fn doorbell(tail: u32) -> Vec<u8> {
    let access = wire::RegionAccess {
        offset: offset::DOORBELLS.into(),
        region: 0,
        count: 4,
    };
    [access.as_bytes(), &tail.to_le_bytes()].concat()
}

#[test]
fn a_client_that_does_not_answer_gets_no_service_but_stays_in_control() {
    let served = ServeOutcome::simple();
    let mut client = served.client();
    client.map(BASE, BYTES, None).unwrap();
    enable(&mut client);
    client.post(command::REGION_WRITE, wire::NO_REPLY, &doorbell(1), &[]);
    let (request, _, _) = client.take();
    assert_eq!(request.command, command::DMA_READ);
    // The controller waits for the reply; unmapping ends that, and the controller fails.
    let started = Instant::now();
    client.unmap(0, BASE, BYTES).unwrap();
    let csts = client.read32(0, offset::CSTS.into());
    assert_eq!(csts & 2, 2, "fatal");
    assert!(started.elapsed() < Duration::from_secs(20));
    // A refused read ends the same way.
    client.map(BASE, BYTES, None).unwrap();
    client.write32(offset::CC, 0);
    enable(&mut client);
    client.post(command::REGION_WRITE, wire::NO_REPLY, &doorbell(1), &[]);
    let (request, _, _) = client.take();
    let refusal = MessageHeader {
        size: 16,
        flags: wire::REPLY | wire::ERROR,
        error: libc::EFAULT as u32,
        ..request
    };
    client.put(refusal, &[], &[]);
    let started = Instant::now();
    while client.read32(0, offset::CSTS.into()) & 2 == 0 {
        assert!(
            started.elapsed() < Duration::from_secs(20),
            "no fatal status"
        );
    }
}

#[test]
fn memory_given_for_reading_is_read_and_never_written() {
    let served = ServeOutcome::simple();
    let mut client = served.client();
    let fd = memfd(BYTES);
    let map = wire::DmaMap {
        argsz: 32,
        flags: wire::DMA_READABLE,
        offset: 0,
        address: BASE + BYTES,
        size: BYTES,
    };
    assert_eq!(super::dma::map(&mut client, map, &[fd.as_fd()]), 0);
    let mut guest = controller::Guest::new(&mut client);
    guest.enable(&mut client);
    guest.submit(admin::identify(admin::cns::CONTROLLER, Nsid::NONE).with_prps(BASE + BYTES, 0));
    assert_eq!(guest.wait(1), 0);
    let copy = crate::memory::GuestMemory::map(fd.as_fd(), 0, BYTES, true).unwrap();
    let mut bytes = vec![0; BYTES as usize];
    copy.span().read(&mut bytes);
    assert!(bytes.iter().all(|byte| *byte == 0));
    assert!(!copy.is_lost());
}

/// A reply has to contain exactly the bytes that were requested: otherwise no command is taken from it.
#[test]
fn a_reply_about_other_bytes_ends_the_access() {
    let served = ServeOutcome::simple();
    let mut client = served.client();
    client.map(BASE, BYTES, None).unwrap();
    let read = wire::RegionAccess {
        offset: offset::CSTS.into(),
        region: 0,
        count: 4,
    };
    for (moved, more) in [(64, 0), (0, 4), (0, -4)] {
        client.write32(offset::CC, 0);
        enable(&mut client);
        client.post(command::REGION_WRITE, wire::NO_REPLY, &doorbell(1), &[]);
        let started = Instant::now();
        client.post(command::REGION_READ, wire::COMMAND, read.as_bytes(), &[]);
        loop {
            let (header, body, _) = client.take();
            if header.flags & wire::TYPE_MASK == wire::REPLY {
                if body[16] & 2 != 0 {
                    break;
                }
                let waited = started.elapsed();
                assert!(waited < Duration::from_secs(60), "no fatal status");
                client.post(command::REGION_READ, wire::COMMAND, read.as_bytes(), &[]);
                continue;
            }
            assert_eq!(header.command, command::DMA_READ, "{moved} {more}");
            let (asked, _) = wire::DmaAccess::read_from_prefix(&body).unwrap();
            let answered = wire::DmaAccess {
                address: asked.address + moved,
                count: asked.count,
            };
            let bytes = vec![0; asked.count.checked_add_signed(more).unwrap() as usize];
            let reply = [answered.as_bytes(), &bytes].concat();
            let header = MessageHeader {
                size: (size_of::<MessageHeader>() + reply.len()) as u32,
                flags: wire::REPLY,
                ..header
            };
            client.put(header, &reply, &[]);
        }
    }
}
