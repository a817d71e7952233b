//! The client against servers that are polite, broken, silent and hostile.

mod regions;
mod server;

use super::VfioUser;
use crate::device::Device;
use crate::error::{Error, Result};
use nvme_core::spec::register::offset;
use nvme_vfio_user::{
    COMMAND, DEVICE_PCI, DmaMap, MessageHeader, NO_REPLY, VersionPayload, command,
};
use server::{Act, Bar, start, start_with};
use std::sync::Arc;
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

/// The patience with servers that do not answer.
const SHORT: Duration = Duration::from_millis(60);

/// Messages that a client sends to open a device, in order.
const OPENING: [u16; 5] = [
    command::VERSION,
    command::DEVICE_GET_INFO,
    command::DEVICE_GET_REGION_INFO,
    command::REGION_READ,
    command::REGION_WRITE,
];

/// Opens a server that answers the first `asked` command with the act that `act` returns.
fn open_against(asked: u16, act: impl Fn(&[u8]) -> Act + Send + 'static) -> Result<VfioUser> {
    open_within(Bar::default().patience, asked, act)
}

fn open_within(
    patience: Duration,
    asked: u16,
    act: impl Fn(&[u8]) -> Act + Send + 'static,
) -> Result<VfioUser> {
    let mut once = Some(act);
    let bar = Bar {
        patience,
        ..Bar::default()
    };
    start_with(bar, move |header, payload| match header.command == asked {
        true => once.take().map(|act| act(payload)),
        false => None,
    })
    .0
}

fn gone(result: Result<VfioUser>) -> String {
    match result {
        Err(Error::Gone { cause }) => cause,
        Err(error) => panic!("{error:?}"),
        Ok(_) => panic!("it opened"),
    }
}

fn unfit(result: Result<VfioUser>) -> String {
    match result {
        Err(Error::Device { cause, .. }) => cause,
        Err(error) => panic!("{error:?}"),
        Ok(_) => panic!("it opened"),
    }
}

#[test]
fn a_polite_server_is_driven() {
    let (device, log) = start(|_, _| None);
    let device = device.unwrap();
    assert_eq!(device.registers().read32(offset::VS), 0x0002_0000);
    assert_eq!(device.registers().read64(offset::CAP), server::CAP);
    device
        .registers()
        .write64(offset::ASQ, 0x1122_3344_5566_7788);
    assert_eq!(
        device.registers().read64(offset::ASQ),
        0x1122_3344_5566_7788
    );
    let pages = Arc::new(device.alloc_dma(100_000).unwrap());
    let iova = device.map_dma(&pages).unwrap();
    device.unmap_dma(iova, pages.len()).unwrap();
    assert_eq!(Arc::strong_count(&pages), 1);
    assert_eq!(device.gone(), None);
    // The doorbells are the server's memory.
    let (tail, _) = device.doorbells().pair(nvme_core::spec::Qid(1), 0).unwrap();
    tail.ring(77);
    assert_eq!(log.doorbell(8), 77);
    drop(device);
    let log = log.finish();
    assert!(
        log.contains(&(command::REGION_WRITE, vec![0x06, 0x04])),
        "memory space, bus master, no INTx"
    );
    let map = log.iter().find(|(command, _)| *command == command::DMA_MAP);
    let map = DmaMap::read_from_bytes(&map.unwrap().1).unwrap();
    // The range that the pages are a part of.
    assert!(map.address <= iova.0 && iova.0 + pages.len() as u64 <= map.address + map.size);
}

#[test]
fn a_reply_that_ends_early_is_a_lost_server() {
    for command in OPENING {
        for bytes in 0..20 {
            let result = open_against(command, move |_| Act::First(bytes));
            let cause = gone(result);
            assert!(
                cause.contains("closed"),
                "command {command}, {bytes} bytes: {cause}"
            );
        }
    }
}

#[test]
fn a_server_that_falls_silent_is_given_up() {
    for command in OPENING {
        for bytes in [0, 1, 16, 17] {
            let act = move |_: &[u8]| Act::FirstThenSilence(bytes);
            let cause = gone(open_within(SHORT, command, act));
            assert!(cause.contains("did not answer in"), "{cause}");
        }
    }
}

#[test]
fn a_server_that_dribbles_does_not_stretch_the_deadline() {
    let act = |_: &[u8]| Act::Dribble(SHORT / 4);
    let cause = gone(open_within(SHORT, command::DEVICE_GET_INFO, act));
    assert!(cause.contains("did not answer in"), "{cause}");
    assert!(open_against(command::DEVICE_GET_INFO, |_| Act::Dribble(Duration::ZERO)).is_ok());
}

#[test]
fn replies_to_something_else_end_the_connection() {
    for command in OPENING {
        let changes: [fn(&mut MessageHeader); 6] = [
            |header| header.id ^= 1,
            |header| header.command ^= 1,
            |header| header.flags = 3,
            |header| header.size = 15,
            |header| header.size = 0,
            |header| header.size = u32::MAX,
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let result = open_against(command, move |_| Act::Changed(change));
            assert!(
                matches!(result, Err(Error::Gone { .. })),
                "{command}, {number}"
            );
        }
    }
}

#[test]
fn any_bit_of_any_reply_may_be_wrong() {
    let mut opened = 0;
    for command in OPENING {
        for bit in 0..80 * 8 {
            match open_within(SHORT / 4, command, move |_| Act::Flip(bit)) {
                Ok(device) => {
                    opened += 1;
                    let (tail, _) = device.doorbells().pair(nvme_core::spec::Qid(3), 0).unwrap();
                    tail.ring(1);
                }
                Err(Error::Device { .. } | Error::Gone { .. }) => {}
                Err(error) => panic!("command {command}, bit {bit}: {error:?}"),
            }
        }
    }
    assert!(opened > 0, "some bits do not matter");
}

#[test]
fn an_error_flag_is_heard() {
    for command in OPENING {
        let cause = unfit(open_against(command, |_| Act::Refuse(libc::EPERM)));
        assert!(
            cause.contains("refused") && cause.contains("not permitted"),
            "{cause}"
        );
    }
    // No error number that exists.
    unfit(open_against(command::VERSION, |_| Act::Refuse(-1)));
}

#[test]
fn versions_and_limits_that_do_not_fit_are_named() {
    let version = |major, minor, json: &str| {
        let mut bytes = VersionPayload { major, minor }.as_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        open_against(command::VERSION, move |_| Act::Say(bytes.clone()))
    };
    for fine in [
        "",
        "\0",
        "{}\0",
        "{\"capabilities\":{}}",
        "{\"capabilities\":{\"max_msg_fds\":1,\"colour\":[1],\"pgsizes\":4096}}\0",
    ] {
        assert!(version(0, 0, fine).is_ok(), "{fine}");
    }
    for (major, minor, json, text) in [
        (1, 0, "", "version 1.0"),
        (0, 2, "", "version 0.2"),
        (0, 1, "[", "make no sense"),
        (
            0,
            1,
            "{\"capabilities\":{\"max_msg_fds\":-1}}\0",
            "make no sense",
        ),
        (
            0,
            1,
            "{\"capabilities\":{\"max_msg_fds\":0}}\0",
            "no descriptors",
        ),
        (
            0,
            1,
            "{\"capabilities\":{\"max_data_xfer_size\":2}}\0",
            "a register",
        ),
        (0, 1, "{\"capabilities\":{\"pgsizes\":2097152}}\0", "2^21"),
    ] {
        let cause = unfit(version(major, minor, json));
        assert!(cause.contains(text), "{cause}");
    }
    unfit(open_against(command::VERSION, |_| Act::Say(vec![0; 3])));
    let one = version(0, 1, "{\"capabilities\":{\"max_dma_maps\":1}}\0").unwrap();
    // All parts of one range are mapped with it; an allocation that does not fit into the range
    // needs another one.
    let map = |bytes| {
        let pages = Arc::new(one.alloc_dma(bytes).unwrap());
        one.map_dma(&pages).map(|iova| (iova, pages.len()))
    };
    let parts = [1, 1 << 20, 8 << 20].map(|bytes| map(bytes).unwrap());
    let error = map(32 << 20).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("takes 1 ranges") && text.contains("max_dma_maps"),
        "{text}"
    );
    assert!(error.remedy().contains("fewer"), "{}", error.remedy());
    for (iova, bytes) in parts {
        one.unmap_dma(iova, bytes).unwrap();
        assert!(one.unmap_dma(iova, bytes).is_err(), "only once");
    }
    assert!(map(32 << 20).is_ok(), "the range was given up");
}

#[test]
fn a_range_is_mapped_once_and_unmapped_with_its_last_part() {
    let (device, log) = start(|_, _| None);
    let device = device.unwrap();
    let parts: Vec<_> = (0..20)
        .map(|_| {
            let pages = Arc::new(device.alloc_dma(1).unwrap());
            (device.map_dma(&pages).unwrap(), pages)
        })
        .collect();
    for (iova, pages) in &parts {
        device.unmap_dma(*iova, pages.len()).unwrap();
        assert_eq!(Arc::strong_count(pages), 1);
    }
    // A part that stays allocated may be mapped again, and its range with it.
    let (_, pages) = &parts[7];
    let iova = device.map_dma(pages).unwrap();
    device.unmap_dma(iova, pages.len()).unwrap();
    drop(device);
    let log = log.finish();
    let count = |asked| log.iter().filter(|(command, _)| *command == asked).count();
    assert_eq!(
        [count(command::DMA_MAP), count(command::DMA_UNMAP)],
        [2, 2],
        "each time for all parts"
    );
}

#[test]
fn a_refused_range_names_the_limit_that_servers_do_not_name() {
    let mut maps = 0;
    let (device, _log) = start(move |header, _| {
        maps += usize::from(header.command == command::DMA_MAP);
        (header.command == command::DMA_MAP && maps > 2).then_some(Act::Refuse(libc::EINVAL))
    });
    let device = device.unwrap();
    let map = |bytes| {
        let pages = Arc::new(device.alloc_dma(bytes).unwrap());
        device.map_dma(&pages).map(|iova| (iova, pages))
    };
    let _held = [map(1).unwrap(), map(8 << 20).unwrap()];
    let error = map(64 << 20).unwrap_err();
    let text = error.to_string();
    for part in ["64 MiB", "2 ranges", "10 MiB", "takes 64 ranges"] {
        assert!(text.contains(part), "{text}");
    }
    assert!(error.remedy().contains("fewer"), "{}", error.remedy());
    assert!(map(1).is_ok(), "what is mapped already is not touched");
}

#[test]
fn other_devices_are_told_apart() {
    let cause = unfit(open_against(command::REGION_READ, |payload| {
        Act::Say([payload, &[0, 0, 0, 2]].concat())
    }));
    assert!(cause.contains("class is 020000"), "{cause}");
    for (flags, regions) in [(0u32, 9u32), (DEVICE_PCI, 7)] {
        let info = [16, flags, regions, 5].as_bytes().to_vec();
        let cause = unfit(open_against(command::DEVICE_GET_INFO, move |_| {
            Act::Say(info.clone())
        }));
        assert!(cause.contains("no PCI function"), "{cause}");
    }
}

#[test]
fn too_many_descriptors_end_the_connection() {
    assert!(open_against(command::DEVICE_GET_INFO, |_| Act::WithFiles(8)).is_ok());
    let cause = gone(open_against(command::DEVICE_GET_INFO, |_| {
        Act::WithFiles(9)
    }));
    assert!(cause.contains("descriptors"), "{cause}");
}

#[test]
fn a_request_of_the_server_is_declined() {
    for flags in [COMMAND, NO_REPLY] {
        let (device, log) = start(move |header, _| {
            (header.command == command::DEVICE_GET_INFO).then_some(Act::AskBefore(flags))
        });
        assert!(device.is_ok());
        drop(device);
        let declined = log.finish();
        let declined = declined
            .iter()
            .filter(|(command, _)| *command == command::DMA_READ);
        assert_eq!(declined.count(), usize::from(flags == COMMAND));
    }
}

#[test]
fn a_lost_server_reads_as_all_ones_and_says_why() {
    let acts = [
        (Act::First(0), "closed the connection"),
        (Act::FirstThenSilence(3), "did not answer in"),
        (Act::Refuse(libc::EINVAL), "refused a read of register 0x1c"),
    ];
    for (act, text) in acts {
        let bar = Bar {
            patience: Duration::from_secs(2),
            ..Bar::default()
        };
        let (device, _log) = start_with(bar, move |header, payload| {
            let csts = header.command == command::REGION_READ
                && payload[..8] == [0x1C, 0, 0, 0, 0, 0, 0, 0];
            csts.then(|| act.clone())
        });
        let device = device.unwrap();
        let pages = Arc::new(device.alloc_dma(1).unwrap());
        let iova = device.map_dma(&pages).unwrap();
        assert_eq!(device.registers().read32(offset::CSTS), u32::MAX);
        let cause = device.gone().unwrap();
        assert!(cause.contains(text), "{cause}");
        assert_eq!(device.registers().read64(offset::CAP), u64::MAX);
        device.registers().write32(offset::CC, 1);
        assert!(matches!(device.reset(), Err(Error::Gone { .. })));
        assert!(matches!(device.map_dma(&pages), Err(Error::Gone { .. })));
        device.unmap_dma(iova, pages.len()).unwrap();
        assert_eq!(device.gone().unwrap(), cause, "the first cause stays");
        assert_eq!(Arc::strong_count(&pages), 1);
    }
}

#[test]
fn an_optional_register_may_be_missing() {
    let (device, _log) = start(|header, payload| {
        let at = |register: u32| payload.starts_with(&u64::from(register).to_ne_bytes());
        (header.command == command::REGION_READ && at(offset::CMBLOC))
            .then_some(Act::Refuse(libc::EINVAL))
    });
    let device = device.unwrap();
    assert_eq!(device.registers().read32(offset::CMBLOC), u32::MAX);
    assert_eq!(device.registers().read32(offset::VS), 0x0002_0000);
    assert_eq!(device.gone(), None);
}

#[test]
fn short_and_long_register_replies_end_the_connection() {
    for bytes in [0, 15, 16, 19, 21, 24] {
        let (device, _log) = start(move |header, payload| {
            let bar = header.command == command::REGION_READ && payload[8] == 0;
            bar.then(|| Act::Say([payload, &[0; 16]].concat()[..bytes].to_vec()))
        });
        let device = device.unwrap();
        assert_eq!(device.registers().read32(offset::CSTS), u32::MAX);
        assert!(device.gone().is_some(), "{bytes} bytes");
    }
}

#[test]
fn a_reset_is_the_functions_where_it_has_one() {
    for resets in [false, true] {
        let bar = Bar {
            resets,
            ..Bar::default()
        };
        let (device, log) = start_with(bar, |_, _| None);
        let device = device.unwrap();
        device.registers().write32(offset::CC, 1);
        device.reset().unwrap();
        drop(device);
        let log = log.finish();
        let count = |asked, data: &[u8]| {
            let same = |entry: &&server::Message| entry.0 == asked && entry.1 == data;
            log.iter().filter(same).count()
        };
        assert_eq!(count(command::DEVICE_RESET, &[]), usize::from(resets));
        assert_eq!(
            count(command::REGION_WRITE, &[6, 4]),
            1 + usize::from(resets)
        );
        assert_eq!(count(command::REGION_WRITE, &[0; 4]), usize::from(!resets));
    }
}
