//! Descriptions of BAR0: doorbells that can be mapped, and invalid descriptions.

use super::server::{Act, BAR_BYTES, Bar, start, start_with};
use super::{gone, open_against, unfit};
use crate::device::Device;
use crate::device::vfio_user::map_area;
use nvme_core::spec::Qid;
use nvme_vfio_user::command;
use std::os::fd::AsFd;

#[test]
fn doorbells_that_cannot_be_mapped_are_refused() {
    let shapes = [
        (
            Bar {
                file: false,
                ..Bar::default()
            },
            "without a descriptor",
        ),
        (
            Bar {
                areas: vec![],
                ..Bar::default()
            },
            "is a doorbell",
        ),
        (
            Bar {
                areas: vec![(0x2000, 0x1000)],
                ..Bar::default()
            },
            "is a doorbell",
        ),
        (
            Bar {
                areas: vec![(0x1000, 4)],
                ..Bar::default()
            },
            "is a doorbell",
        ),
        (
            Bar {
                file_bytes: 0x1000,
                ..Bar::default()
            },
            "past the end",
        ),
        (
            Bar {
                file_offset: u64::MAX - BAR_BYTES,
                ..Bar::default()
            },
            "of their file",
        ),
        (
            Bar {
                file_offset: 8,
                ..Bar::default()
            },
            "of their file",
        ),
    ];
    for (bar, text) in shapes {
        let cause = unfit(start_with(bar, |_, _| None).0);
        assert!(cause.contains(text), "{cause}");
    }
    let odd = [
        Bar {
            areas: vec![(0x1000, BAR_BYTES)],
            ..Bar::default()
        },
        Bar {
            areas: vec![(u64::MAX, 2)],
            ..Bar::default()
        },
        Bar {
            file_offset: u64::MAX,
            ..Bar::default()
        },
    ];
    for bar in odd {
        gone(start_with(bar, |_, _| None).0);
    }
    // Described at once, in two steps, and in one area with the registers.
    for bar in [
        Bar {
            at_once: true,
            ..Bar::default()
        },
        Bar {
            coy: true,
            ..Bar::default()
        },
        Bar {
            areas: vec![(0, BAR_BYTES)],
            ..Bar::default()
        },
        Bar {
            areas: vec![(0x3000, 0x1000), (0x1000, 0x1000)],
            ..Bar::default()
        },
    ] {
        let (device, log) = start_with(bar, |_, _| None);
        let device = device.unwrap();
        let (_, head) = device.doorbells().pair(Qid(0), 0).unwrap();
        head.ring(5);
        assert_eq!(log.doorbell(4), 5);
    }
}

#[test]
fn a_description_that_never_ends_is_cut_off() {
    // Each answer asks for more room.
    let grown = |payload: &[u8]| {
        let mut info = payload[..32].to_vec();
        let room = u32::from_ne_bytes(info[..4].try_into().unwrap());
        info[..4].copy_from_slice(&(room + 16).to_ne_bytes());
        info[4..8].copy_from_slice(&0xFu32.to_ne_bytes());
        Act::Say(info)
    };
    let (result, _) = start(move |header, payload| {
        (header.command == command::DEVICE_GET_REGION_INFO).then(|| grown(payload))
    });
    gone(result);
    let cause = gone(open_against(command::DEVICE_GET_REGION_INFO, |payload| {
        let mut info = payload[..32].to_vec();
        info[..4].copy_from_slice(&u32::MAX.to_ne_bytes());
        info[4..8].copy_from_slice(&0xFu32.to_ne_bytes());
        Act::Say(info)
    }));
    assert!(cause.contains("to describe"), "{cause}");
}

/// The area begins at no page of such a machine, on which the kernel refuses to map it alone.
#[test]
fn doorbells_are_mapped_with_their_page_of_64_kib() {
    let file = rustix::fs::memfd_create("bar", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 0x1_3000).unwrap();
    for (at, lead) in [(0x1000, 0x1000), (0x1_2000, 0x2000)] {
        let (area, offset) = map_area(file.as_fd(), at, 0x1000, 64 << 10).unwrap();
        assert_eq!(offset, lead);
        let (_, head) = area.doorbells(offset).pair(Qid(0), 0).unwrap();
        head.ring(5);
        let mut word = [0; 4];
        rustix::io::pread(&file, &mut word, at + 4).unwrap();
        assert_eq!(u32::from_le_bytes(word), 5);
    }
}
