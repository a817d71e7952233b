//! Version, device, region and interrupt information, region access.

use super::*;
use crate::vfio_user::wire::{irq, region};
use nvme_spec::register::offset;

const INVAL: i32 = libc::EINVAL;
const OPNOTSUPP: i32 = libc::EOPNOTSUPP;

#[test]
fn a_version_without_capabilities_is_answered_without() {
    let served = ServeOutcome::simple();
    assert_eq!(Client::new(served.raw()).greet(""), "");
    let text = Client::new(served.raw()).greet(r#"{"capabilities":{"new":{"a":[1]}},"x":2}"#);
    let text = text.strip_suffix('\0').expect("a NUL");
    let data: wire::VersionData = serde_json::from_str(text).unwrap();
    assert_eq!(data.capabilities.max_data_xfer_size, Some(1 << 20));
    assert_eq!(data.capabilities.write_multiple, None, "was not proposed");
    let text = Client::new(served.raw()).greet("{}");
    assert!(text.contains("max_msg_fds"), "{text}");
}

#[test]
fn a_client_without_a_common_version_is_put_out() {
    let served = ServeOutcome::simple();
    let bodies: [(u16, &[u8]); 5] = [
        (command::VERSION, &[1, 0, 0, 0]),
        (command::VERSION, &[0, 0, 0]),
        (command::VERSION, b"\0\0\x01\0{\"capabilities\":7}\0"),
        (command::VERSION, b"\0\0\x01\0\xFF\xFE\0"),
        (command::DEVICE_GET_INFO, &[16; 16]),
    ];
    for (code, body) in bodies {
        let mut client = Client::new(served.raw());
        assert_eq!(client.send(code, body, &[]).err(), Some(INVAL));
        assert_eq!(client.socket.read(&mut [0]).unwrap(), 0, "closed");
    }
    let mut client = served.client();
    assert_eq!(
        client.send(command::VERSION, &[0; 4], &[]).err(),
        Some(INVAL)
    );
    assert!(
        client.read(0, 0, 4).is_ok(),
        "a second version is only refused"
    );
    drop(client);
    let left = served.stop();
    assert!(left.len() >= 5);
    assert!(
        left[..5]
            .iter()
            .all(|one| *one == ClientExit::Disconnected("no common version"))
    );
}

#[test]
fn what_is_unknown_or_not_offered_is_refused_and_the_stream_goes_on() {
    let mut client = ServeOutcome::simple().hold_client();
    for code in [0, 11, 12, 17, 18, 99, 0xFFFF] {
        assert_eq!(
            client.send(code, &[0; 64], &[]).err(),
            Some(INVAL),
            "{code}"
        );
    }
    for code in [command::DIRTY_PAGES, command::DEVICE_FEATURE] {
        assert_eq!(client.send(code, &[0; 64], &[]).err(), Some(OPNOTSUPP));
    }
    // Every command with a structure refuses a body that is too short.
    for code in [2, 3, 4, 5, 6, 7, 8, 9, 10, 15] {
        assert_eq!(client.send(code, &[0; 7], &[]).err(), Some(INVAL), "{code}");
    }
    // A command without a reply, wrong or right, has none.
    client.post(99, wire::NO_REPLY, &[], &[]);
    client.post(command::DEVICE_RESET, wire::NO_REPLY, &[], &[]);
    assert!(client.send(command::DEVICE_RESET, &[], &[]).is_ok());
}

#[test]
fn the_device_tells_its_regions_and_interrupts() {
    let mut client = ServeOutcome::simple().hold_client();
    let mut info = wire::DeviceInfo {
        argsz: 16,
        flags: 0,
        num_regions: 0,
        num_irqs: 0,
    };
    let (body, _) = client
        .send(command::DEVICE_GET_INFO, info.as_bytes(), &[])
        .unwrap();
    let told = wire::DeviceInfo::read_from_bytes(&body).unwrap();
    assert_eq!((told.flags, told.num_regions, told.num_irqs), (3, 9, 5));
    info.argsz = 15;
    assert_eq!(client.refused(command::DEVICE_GET_INFO, &info), INVAL);
    let mut ask = |index, argsz| {
        let info = wire::IrqInfo {
            argsz,
            flags: 0,
            index,
            count: 0,
        };
        let (body, _) = client.send(command::DEVICE_GET_IRQ_INFO, info.as_bytes(), &[])?;
        let told = wire::IrqInfo::read_from_bytes(&body).unwrap();
        Ok((told.flags, told.count))
    };
    assert_eq!(ask(irq::INTX, 16), Ok((7, 1)));
    assert_eq!(ask(irq::MSIX, 16), Ok((3, 65)));
    for index in [irq::MSI, irq::ERR, irq::REQ] {
        assert_eq!(ask(index, 16), Ok((0, 0)));
    }
    assert_eq!((ask(5, 16), ask(irq::MSIX, 12)), (Err(INVAL), Err(INVAL)));
}

fn region_info(client: &mut Client, index: u32, argsz: u32) -> Result<(Vec<u8>, usize), i32> {
    let info = wire::RegionInfo {
        argsz,
        flags: 0,
        index,
        cap_offset: 0,
        size: 0,
        offset: 0,
    };
    let (body, fds) = client.send(command::DEVICE_GET_REGION_INFO, info.as_bytes(), &[])?;
    Ok((body, fds.len()))
}

#[test]
fn capabilities_come_once_there_is_room_for_them() {
    let mut client = ServeOutcome::simple().hold_client();
    let (body, fds) = region_info(&mut client, 0, 32).unwrap();
    let small = wire::RegionInfo::read_from_bytes(&body).unwrap();
    assert_eq!(
        (small.argsz, small.flags, small.size, fds),
        (64, 0xF, 16 << 10, 0)
    );
    let (body, fds) = region_info(&mut client, 0, small.argsz).unwrap();
    assert_eq!((body.len(), fds), (64, 1));
    let (info, rest) = wire::RegionInfo::read_from_prefix(&body).unwrap();
    assert_eq!((info.cap_offset, info.offset), (32, 0));
    let (capability, rest) = wire::InfoCapability::read_from_prefix(rest).unwrap();
    assert_eq!(
        (capability.id, capability.version, capability.next),
        (1, 1, 0)
    );
    let (sparse, rest) = wire::SparseMmap::read_from_prefix(rest).unwrap();
    let area = wire::SparseArea::read_from_bytes(rest).unwrap();
    assert_eq!((sparse.areas, area.offset, area.size), (1, 0x1000, 0x1000));
    let sizes = [16 << 10, 0, 0, 0, 8 << 10, 0, 0, 4096, 0];
    for (index, size) in (0..).zip(sizes) {
        let (body, _) = region_info(&mut client, index, 32).unwrap();
        let info = wire::RegionInfo::read_from_prefix(&body).unwrap().0;
        assert_eq!((info.index, info.size), (index, size));
        assert_eq!(info.flags & 3, if size == 0 { 0 } else { 3 });
    }
    assert_eq!(region_info(&mut client, 9, 32), Err(INVAL));
    assert_eq!(region_info(&mut client, 0, 31), Err(INVAL));
}

#[test]
fn accesses_stay_inside_their_region() {
    let mut client = ServeOutcome::simple().hold_client();
    let cap = client.read(region::BAR0, 0, 8).unwrap();
    let bytes: Vec<u8> = (0..8)
        .flat_map(|at| client.read(region::BAR0, at, 1).unwrap())
        .collect();
    assert_eq!(cap, bytes);
    assert_eq!(client.read(region::BAR0, 0, 64).unwrap()[..8], cap);
    assert_eq!(client.read32(region::CONFIG, 8) >> 8, 0x01_0802);
    let ends = [
        (region::BAR0, 16 << 10),
        (region::BAR4, 8 << 10),
        (region::CONFIG, 4096),
    ];
    for (index, end) in ends {
        assert!(client.read(index, end - 4, 4).is_ok());
        assert_eq!(client.read(index, end - 3, 4), Err(INVAL));
        assert_eq!(client.write(index, end, &[0]), Err(INVAL));
        assert_eq!(client.read(index, u64::MAX - 1, 4), Err(INVAL));
        assert_eq!(client.read(index, 0, 0), Err(INVAL));
    }
    for index in [1, 2, 3, 5, 6, 8, 9, u32::MAX] {
        assert_eq!(client.read(index, 0, 4), Err(INVAL));
        assert_eq!(client.write(index, 0, &[0; 4]), Err(INVAL));
    }
    assert_eq!(client.read(region::BAR0, 0, (1 << 20) + 1), Err(INVAL));
    // A write whose count is larger than its data.
    let access = wire::RegionAccess {
        offset: 0,
        region: 0,
        count: 8,
    };
    let body = [access.as_bytes(), &[0; 7]].concat();
    assert_eq!(
        client.send(command::REGION_WRITE, &body, &[]).err(),
        Some(INVAL)
    );
    // Registers are written as words; other writes have no effect.
    client
        .write(region::BAR0, offset::AQA.into(), &[3, 0, 3, 0])
        .unwrap();
    client
        .write(region::BAR0, u64::from(offset::AQA) + 1, &[9; 4])
        .unwrap();
    client
        .write(region::BAR0, offset::AQA.into(), &[9])
        .unwrap();
    assert_eq!(client.read32(region::BAR0, offset::AQA.into()), 0x0003_0003);
    client
        .write(
            region::BAR0,
            offset::ASQ.into(),
            &0x1_2345_6000u64.to_le_bytes(),
        )
        .unwrap();
    assert_eq!(
        client.read(region::BAR0, offset::ASQ.into(), 8).unwrap()[1],
        0x60
    );
}

#[test]
fn several_writes_in_one_message_are_done_in_order() {
    let served = ServeOutcome::simple();
    let mut client = Client::new(served.raw());
    let text = client.greet(r#"{"capabilities":{"write_multiple":true}}"#);
    assert!(text.contains(r#""write_multiple":true"#), "{text}");
    let write = |offset: u32, value: u32, count| {
        let mut data = [0; 8];
        data[..4].copy_from_slice(&value.to_le_bytes());
        wire::SmallWrite {
            access: wire::RegionAccess {
                offset: offset.into(),
                region: region::BAR0,
                count,
            },
            data,
        }
    };
    let writes = [write(offset::AQA, 1, 4), write(offset::AQA, 5, 4)];
    let body = [&2u64.to_le_bytes(), writes.as_bytes()].concat();
    let (reply, _) = client
        .send(command::REGION_WRITE_MULTI, &body, &[])
        .unwrap();
    assert_eq!(reply, 2u64.to_le_bytes());
    assert_eq!(client.read32(region::BAR0, offset::AQA.into()), 5);
    for (count, writes) in [(3, writes), (u64::MAX, writes), (2, [write(0, 0, 9); 2])] {
        let body = [&count.to_le_bytes(), writes.as_bytes()].concat();
        let refused = client.send(command::REGION_WRITE_MULTI, &body, &[]);
        assert_eq!(refused.err(), Some(INVAL));
    }
}

#[test]
fn doorbells_can_be_rung_through_descriptors() {
    let mut client = ServeOutcome::new(config(), 2).hold_client();
    let mut ask = |argsz, index| {
        let ask = wire::RegionIoFds {
            argsz,
            flags: 0,
            index,
            count: 0,
        };
        client.send(command::DEVICE_GET_REGION_IO_FDS, ask.as_bytes(), &[])
    };
    let (small, fds) = ask(16, 0).unwrap();
    let small = wire::RegionIoFds::read_from_bytes(&small).unwrap();
    assert_eq!((small.argsz, small.count, fds.len()), (16 + 5 * 48, 0, 0));
    let (body, fds) = ask(small.argsz, 0).unwrap();
    assert_eq!((body.len(), fds.len()), (small.argsz as usize, 3));
    for (qid, one) in body[16..].chunks_exact(48).enumerate() {
        let one = wire::IoEventFd::read_from_bytes(one).unwrap();
        assert_eq!((one.offset, one.size), (0x1000 + qid as u64 * 8, 8));
        assert_eq!((one.offset, one.shadow_fd_index), (one.shadow_offset, 0));
        assert_eq!((one.fd_index, one.kind), (1 + qid as u32 % 2, 2));
    }
    assert_eq!(ask(4096, region::CONFIG).err(), Some(OPNOTSUPP));
    assert_eq!(ask(4096, 1).err(), Some(INVAL));
    assert_eq!(ask(15, 0).err(), Some(INVAL));
}
