//! `p2p` with a mapped file as the peer's memory.
#![cfg(feature = "sim")]

mod common;

use common::{Folder, Place, bytes};

const MIB: usize = 1 << 20;

#[test]
fn blocks_go_to_the_peer_and_back_and_nothing_stays_changed() {
    let folder = Folder::new(Place::Embedded);
    let image = bytes(&folder.file("disk.img", 4 * MIB, 1));
    let peer = bytes(&folder.file("peer", 3 * MIB, 2));
    let arguments = ["p2p", "-d", "sim:disk.img?mdts=2", "--peer", "peer"];
    let place = ["--offset", "1MiB", "--size", "2MiB", "--lba", "256"];
    let report = folder.json(&[&arguments[..], &place[..]].concat());
    assert_eq!(report["bytes"], 2 * MIB);
    assert_eq!(report["read_verified"], true);
    assert_eq!(report["write_verified"], true);
    assert!(bytes(&folder.path("disk.img")) == image);
    assert!(bytes(&folder.path("peer")) == peer);
}

#[test]
fn after_a_failure_everything_is_put_back_too() {
    let folder = Folder::new(Place::Embedded);
    let image = bytes(&folder.file("disk.img", 4 * MIB, 1));
    let peer = bytes(&folder.file("peer", MIB, 2));
    for op in ["read", "write"] {
        // The fault is on the second queue, whose commands use the peer's memory.
        let device = format!("sim:disk.img?mdts=2&fault=status:0x281@qid=2,op={op},nth=5");
        folder.fails(
            &["p2p", "-d", &device, "--peer", "peer"],
            1,
            "peer ended with",
        );
        assert!(bytes(&folder.path("peer")) == peer, "{op}");
        assert!(bytes(&folder.path("disk.img")) == image, "{op}");
    }
}

#[test]
fn wrong_places_are_refused() {
    let folder = Folder::new(Place::Embedded);
    folder.file("disk.img", 4 * MIB, 1);
    folder.file("peer", MIB, 2);
    let fails = |more: &[&str], code, text| {
        let all = [&["p2p", "-d", "sim:disk.img"], more].concat();
        folder.fails(&all, code, text);
    };
    fails(&["--peer", "none"], 4, "cannot open none");
    fails(&["--peer", "peer", "--size", "100"], 2, "whole pages");
    fails(&["--peer", "peer", "--offset", "100"], 2, "whole pages");
    fails(
        &["--peer", "peer", "--size", "8MiB"],
        2,
        "end past namespace",
    );
}
