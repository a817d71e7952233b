//! Our client on another project's server (`vfio_user` of rust-vmm) with a controller that shares no code with ours: a
//! mistake that both of our own sides share would show here.
#![cfg(feature = "vfio-user")]

mod common;
#[path = "foreign/controller.rs"]
mod controller;

use common::{Folder, Place, Scratch, bytes};
use controller::{BLOCK, BLOCKS, Controller, PAIRS};
use nvme_host::core::spec::{Lba, Nsid, admin::FeatureSelect, nvm};
use std::fs::File;
use std::io::{Error, Result};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use vfio_bindings::bindings::vfio::{
    VFIO_REGION_INFO_FLAG_CAPS, VFIO_REGION_INFO_FLAG_MMAP, VFIO_REGION_INFO_FLAG_READ,
    VFIO_REGION_INFO_FLAG_WRITE, vfio_region_info, vfio_region_sparse_mmap_area,
};
use vfio_user::{DmaMapFlags, DmaUnmapFlags, Server, ServerBackend, ServerRegion, SparseArea};

const BAR0: u32 = 0;
const CONFIG: u32 = 7;
/// Limit of libvfio-user (MAX_DMA_REGIONS of its lib/private.h): it refuses more with EINVAL and does not report the
/// limit when the version is negotiated.
const MOST_MAPS: usize = 64;

type Shared = Arc<Mutex<Controller>>;

struct Backend {
    controller: Shared,
    config: [u8; 256],
}

impl ServerBackend for Backend {
    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<()> {
        match region {
            BAR0 => {
                let value = self.controller.lock().unwrap().read(offset);
                data.copy_from_slice(&value.to_le_bytes());
            }
            _ => data.copy_from_slice(&self.config[offset as usize..][..data.len()]),
        }
        Ok(())
    }

    fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<()> {
        match region {
            BAR0 => {
                let [low, high] = [self.config[4], self.config[5]];
                assert_eq!(low & 6, 6, "memory space and bus master");
                let value = u32::from_le_bytes(data.try_into().unwrap());
                let mut controller = self.controller.lock().unwrap();
                controller.intx = high & 4 == 0;
                controller.write(offset, value);
            }
            _ => self.config[offset as usize..][..data.len()].copy_from_slice(data),
        }
        Ok(())
    }

    fn dma_map(
        &mut self,
        flags: DmaMapFlags,
        offset: u64,
        address: u64,
        size: u64,
        file: Option<File>,
    ) -> Result<()> {
        assert_eq!(flags, DmaMapFlags::READ_WRITE);
        let mut controller = self.controller.lock().unwrap();
        if controller.maps() >= MOST_MAPS {
            return Err(Error::from_raw_os_error(libc::EINVAL));
        }
        controller.map(address, size, file.expect("a descriptor"), offset);
        Ok(())
    }

    fn dma_unmap(&mut self, _: DmaUnmapFlags, address: u64, size: u64) -> Result<()> {
        self.controller.lock().unwrap().unmap(address, size);
        Ok(())
    }

    fn reset(&mut self) -> Result<()> {
        self.config[4..6].fill(0);
        self.controller.lock().unwrap().reset();
        Ok(())
    }

    fn set_irqs(&mut self, _: u32, _: u32, _: u32, _: u32, _: Vec<File>) -> Result<()> {
        unreachable!("interrupts are not used")
    }
}

/// Returns the regions of an NVMe function whose doorbells are `bar`, a file with one page.
fn regions(bar: &File) -> Vec<ServerRegion> {
    let region = |index| {
        let mut region_info = vfio_region_info {
            argsz: size_of::<vfio_region_info>() as u32,
            index,
            ..Default::default()
        };
        let mut sparse_areas = Vec::new();
        let mut mmap_fd = None;
        let access = VFIO_REGION_INFO_FLAG_READ | VFIO_REGION_INFO_FLAG_WRITE;
        if index == BAR0 {
            region_info.flags = access | VFIO_REGION_INFO_FLAG_MMAP | VFIO_REGION_INFO_FLAG_CAPS;
            region_info.size = 0x2000;
            let area = vfio_region_sparse_mmap_area {
                offset: 0x1000,
                size: 0x1000,
            };
            sparse_areas.push(SparseArea { area });
            mmap_fd = Some(bar.as_raw_fd());
        } else if index == CONFIG {
            region_info.flags = access;
            region_info.size = 256;
        }
        ServerRegion {
            region_info,
            sparse_areas,
            mmap_fd,
        }
    };
    (0..9).map(region).collect()
}

/// Serves a controller at `socket`, client after client, until the test ends.
fn serve(socket: &Path, resettable: bool) -> Shared {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let bar = File::from(rustix::fs::memfd_create("foreign-bar", flags).unwrap());
    bar.set_len(0x2000).unwrap();
    let controller = Arc::new(Mutex::new(Controller::new(bar.try_clone().unwrap())));
    let server = Server::new(socket, resettable, Vec::new(), regions(&bar)).unwrap();
    let shared = Arc::clone(&controller);
    std::thread::spawn(move || {
        // The regions refer to the BAR's file by its descriptor number, so that it stays open.
        let _bar = bar;
        loop {
            let mut config = [0; 256];
            config[8..12].copy_from_slice(&[0, 2, 8, 1]);
            let mut backend = Backend {
                controller: Arc::clone(&shared),
                config,
            };
            server.run(&mut backend).unwrap();
            assert!(shared.lock().unwrap().is_let_go(), "memory is left mapped");
        }
    });
    let shared = Arc::clone(&controller);
    std::thread::spawn(move || {
        loop {
            shared.lock().unwrap().step();
            // The server's thread wants the lock too.
            std::thread::sleep(Duration::from_micros(50));
        }
    });
    controller
}

struct Setup {
    controller: Shared,
    folder: Folder,
    device: String,
    _socket: Scratch,
}

fn setup(resettable: bool) -> Setup {
    let scratch = Scratch::new();
    let socket: PathBuf = scratch.0.join("cntrl");
    Setup {
        controller: serve(&socket, resettable),
        folder: Folder::new(Place::Embedded),
        device: format!("vfio-user:{}", socket.display()),
        _socket: scratch,
    }
}

#[test]
fn every_byte_goes_there_and_back() {
    let Setup { folder, device, .. } = &setup(false);
    let input = bytes(&folder.file("in", 100 * BLOCK, 1));
    let write = ["write", "-d", device, "--lba", "99", "--in", "in"];
    folder.fails(&write, 2, "--allow-write");
    folder.ok(&[&write[..], &["--allow-write"]].concat());
    folder.ok(&[
        "read", "-d", device, "--lba", "99", "--blocks", "100", "--out", "out",
    ]);
    assert!(bytes(&folder.path("out")) == input);
    folder.ok(&["flush", "-d", device]);
    let last = BLOCKS.to_string();
    folder.fails(
        &["read", "-d", device, "--lba", &last],
        2,
        "past namespace 1",
    );
    let report = folder.json(&[
        "bench",
        "-d",
        device,
        "--rw",
        "randrw",
        "--io-size",
        "4MiB",
        "--queues",
        "2",
        "--verify",
        "--allow-write",
    ]);
    assert!(report["verified_bytes"].as_u64().unwrap() > 0);
}

#[test]
fn a_plain_controller_is_described() {
    let Setup { folder, device, .. } = &setup(false);
    let ctrl = folder.json(&["identify", "ctrl", "-d", device]);
    assert_eq!(ctrl["sn"], "FOREIGN-1");
    let list = folder.json(&["list-ns", "-d", device]);
    assert_eq!(list["nsid_list"][0]["nsid"], 1);
    assert_eq!(folder.json(&["regs", "-d", device])["csts"], 1);
    folder.fails(&["smart-log", "-d", device], 1, "Get Log Page");
}

#[test]
fn a_reset_is_carried_out_by_either_way() {
    for resettable in [false, true] {
        let Setup {
            controller, device, ..
        } = &setup(resettable);
        let opened = nvme_host::open(device).unwrap();
        for _ in 0..2 {
            let config = nvme_host::ControllerConfig::default();
            let started = nvme_host::Controller::start(Arc::clone(&opened), &config).unwrap();
            started.shut_down().unwrap();
            opened.reset().unwrap();
            assert_eq!(controller.lock().unwrap().read(0x1C), 0);
        }
        // The controller was reset once when it was made, then by message if the server supports that.
        let by_message = controller.lock().unwrap().resets - 1;
        assert_eq!(by_message, if resettable { 2 } else { 0 });
    }
}

#[test]
fn a_hundred_queues_fit_into_the_ranges_that_a_server_takes() {
    let Setup {
        controller: server,
        device,
        ..
    } = &setup(false);
    let config = nvme_host::ControllerConfig {
        queue_pairs: PAIRS,
        timeout: Duration::from_secs(60),
        ..nvme_host::ControllerConfig::default()
    };
    let opened = nvme_host::open(device).unwrap();
    let controller = nvme_host::Controller::start(opened, &config).unwrap();
    let device = controller.device();
    let mut queues: Vec<_> = (0..PAIRS)
        .map(|_| {
            let queue = controller.create_queue_pair(1025).unwrap();
            assert_eq!(queue.depth(), 1024);
            let buffers = nvme_host::DmaBuffer::several(device, BLOCK, 1024).unwrap();
            (queue, buffers)
        })
        .collect();
    let maps = server.lock().unwrap().maps();
    assert!(maps <= 16, "{maps} ranges of memory");
    for (index, (queue, buffers)) in queues.iter_mut().enumerate() {
        let lba = Lba(index as u64 % BLOCKS);
        let mut buffer = buffers.pop().unwrap();
        buffer.as_mut_slice().fill(index as u8 + 1);
        let write = nvm::write(Nsid(1), lba, 1);
        queue.submit(write, Some(buffer)).unwrap();
        queue.ring();
        assert!(queue.wait().unwrap().unwrap().is_success());
        let read = nvm::read(Nsid(1), lba, 1);
        queue.submit(read, buffers.pop()).unwrap();
        queue.ring();
        let done = queue.wait().unwrap().unwrap();
        assert!(done.is_success());
        assert_eq!(done.buffer.unwrap().as_slice(), [index as u8 + 1; BLOCK]);
    }
    // Memory that is not used any more is unmapped, and can be mapped again.
    for _ in 0..200 {
        let (queue, buffers) = queues.pop().unwrap();
        drop((queue, buffers));
        let queue = controller.create_queue_pair(1025).unwrap();
        let buffers = nvme_host::DmaBuffer::several(device, BLOCK, 1024).unwrap();
        queues.push((queue, buffers));
    }
    assert!(server.lock().unwrap().maps() <= 16);
}

#[test]
fn what_identify_does_not_offer_is_never_sent() {
    let Setup {
        controller: server,
        folder,
        device,
        ..
    } = &setup(false);
    {
        let opened = nvme_host::open(device).unwrap();
        let controller =
            nvme_host::Controller::start(opened, &nvme_host::ControllerConfig::default());
        let controller = controller.unwrap();
        let mut namespace = controller.namespace(Nsid(1)).unwrap();
        let refused = [
            namespace.compare(Lba(0), &[0; BLOCK]),
            namespace.write_zeroes(Lba(0), 1, false),
            namespace.deallocate(&[(Lba(0), 1)]),
            controller
                .get_feature(2, FeatureSelect::Capabilities, Nsid(0), 0)
                .map(drop),
        ];
        for (result, bit) in refused.into_iter().zip([0, 3, 2, 4]) {
            let error = result.unwrap_err();
            assert!(
                matches!(error, nvme_host::Error::Unsupported { .. }),
                "{error}"
            );
            let bit = format!("bit {bit} of ONCS is 0");
            assert!(error.to_string().contains(&bit), "{error}");
        }
    }
    let compare = ["get-feature", "-d", device, "-f", "2", "-s", "capabilities"];
    folder.fails(&compare, 1, "bit 4 of ONCS");
    let server = server.lock().unwrap();
    assert_eq!([5, 8, 9].map(|opcode| server.executed(opcode)), [0; 3]);
}

/// Write Zeroes is there, and Identify Namespace does not offer its Deallocate bit (DLFEAT is 0).
#[test]
fn write_zeroes_does_not_deallocate_where_dlfeat_has_no_bit() {
    let Setup {
        controller: server,
        folder,
        device,
        ..
    } = &setup(false);
    server.lock().unwrap().identify = vec![(1, 520, 1 << 3)];
    let zeroes = [
        "write-zeroes",
        "-d",
        device,
        "-s",
        "0",
        "-b",
        "1",
        "--allow-write",
    ];
    let deallocating = [&zeroes[..], &["--deac"]].concat();
    folder.fails(&deallocating, 1, "bit 3 of DLFEAT is 0");
    assert_eq!(server.lock().unwrap().executed(8), 0, "nothing is sent");
    folder.ok(&zeroes);
    assert_eq!(server.lock().unwrap().executed(8), 1);
}

/// Makes a controller with other Identify data: bytes by CNS and offset.
fn with(identify: &[(u8, usize, u8)]) -> (Setup, nvme_host::Controller) {
    let setup = setup(false);
    setup.controller.lock().unwrap().identify = identify.to_vec();
    let opened = nvme_host::open(&setup.device).unwrap();
    let controller = nvme_host::Controller::start(opened, &nvme_host::ControllerConfig::default());
    (setup, controller.unwrap())
}

fn refused<T>(result: std::result::Result<T, nvme_host::Error>, part: &str) {
    let error = result.map(drop).unwrap_err();
    assert!(error.to_string().contains(part), "{part}: {error}");
}

#[test]
fn an_erasure_that_the_controller_does_not_have_is_never_sent() {
    use nvme_host::core::spec::admin::{Format, SanitizeAction, SanitizeFields};
    const MINUTE: Duration = Duration::from_secs(60);
    let (_setup, controller) = with(&[]);
    let format = |controller: &nvme_host::Controller, nsid, ses| {
        controller.format(Nsid(nsid), Format::new(0, ses), MINUTE, |_| ())
    };
    refused(format(&controller, 1, 0), "does not have Format NVM");
    for action in [
        SanitizeAction::BlockErase,
        SanitizeAction::CryptoErase,
        SanitizeAction::Overwrite,
        SanitizeAction::ExitFailureMode,
    ] {
        let sanitize = controller.sanitize(SanitizeFields::new(action));
        refused(sanitize, "does not have this sanitize action");
    }
    drop(controller);
    // OACS bit 1; FNA bit 3; SANICAP bits 1 and 29.
    let (_setup, controller) = with(&[(1, 256, 2), (1, 524, 8), (1, 328, 2), (1, 331, 0x20)]);
    refused(format(&controller, 1, 2), "secure erase settings 2");
    refused(format(&controller, u32::MAX, 0), "every namespace at once");
    let keep = SanitizeFields {
        no_deallocate: true,
        ..SanitizeFields::new(SanitizeAction::BlockErase)
    };
    refused(controller.sanitize(keep), "inhibits no-deallocate");
    drop(controller);
    // FNA bit 0, NN, and namespaces 1 and 2.
    let (_setup, controller) = with(&[(1, 256, 2), (1, 524, 1), (1, 516, 2), (2, 4, 2)]);
    refused(format(&controller, 1, 0), "would format all 2 namespaces");
}

#[test]
fn a_namespace_that_cannot_be_used_says_why() {
    // Blocks of 2 bytes, and of 64 KiB.
    let (_setup, controller) = with(&[(0, 130, 1)]);
    refused(controller.namespace(Nsid(1)), "cannot be used");
    drop(controller);
    let (_setup, controller) = with(&[(0, 128, 8)]);
    refused(controller.namespace(Nsid(1)), "8 bytes of metadata");
    drop(controller);
    let (_setup, controller) = with(&[(0, 130, 16)]);
    let namespace = controller.namespace(Nsid(1));
    let checked = namespace.and_then(|namespace| namespace.check(Lba(0), 1));
    refused(checked, "longer than the controller's largest transfer");
    drop(controller);
    // ONCS bit 3 without DLFEAT bit 3.
    let (_setup, controller) = with(&[(1, 520, 8)]);
    let mut namespace = controller.namespace(Nsid(1)).unwrap();
    refused(namespace.write_zeroes(Lba(0), 1, true), "bit 3 of DLFEAT");
    refused(namespace.write_zeroes(Lba(0), 0, false), "no blocks");
    refused(namespace.deallocate(&[]), "bit 2 of ONCS");
    refused(namespace.write(Lba(0), &[0; 7]), "not a whole number");
    assert_eq!(namespace.info().nsid, Nsid(1));
    assert_eq!(namespace.limits().block_bytes as usize, BLOCK);
    assert_eq!(namespace.queue().statistics().expired, 0);
    refused(controller.namespace(Nsid(7)), "no namespace 7");
}

#[test]
fn a_subsystem_reset_is_seen_or_told_to_be_missing() {
    let before = setup(false);
    let reset = ["reset", "-d", &before.device, "--subsystem"];
    before.folder.fails(&reset, 2, "--allow-write");
    let (setup, controller) = with(&[]);
    refused(controller.reset_subsystem(), "CAP.NSSRS is 0");
    // The controller claims to have the reset, but nothing happens.
    setup.controller.lock().unwrap().set(0x04, 1 << 5 | 1 << 4);
    refused(controller.reset_subsystem(), "CSTS.NSSRO");
}

#[test]
fn a_namespace_of_another_command_set_is_named() {
    for (csi, part) in [
        (
            1,
            "namespace 1 cannot be used: it belongs to command set 1 (key value)",
        ),
        (
            2,
            "namespace 1 cannot be used: it belongs to command set 2 (zoned)",
        ),
        (
            0x30,
            "namespace 1 cannot be used: it belongs to command set 48",
        ),
        (0, "Invalid Namespace or Format"),
    ] {
        for describes in [true, false] {
            // A descriptor: NIDT 4, one byte. Some controllers describe such a namespace as if it were of NVM.
            let (setup, controller) = with(&[(3, 0, 4), (3, 1, 1), (3, 4, csi)]);
            if describes && csi != 0 {
                refused(controller.namespace(Nsid(1)), part);
                continue;
            }
            setup.controller.lock().unwrap().refused = Some(0);
            refused(controller.usable_namespace(Nsid(1)), part);
        }
    }
}

/// NVMe 1.0 has no list of active namespaces (CNS 02h): identifiers are tried one by one, in bring-up, too.
#[test]
fn a_controller_without_a_list_of_namespaces_is_used() {
    let setup = setup(false);
    setup.controller.lock().unwrap().refused = Some(2);
    let opened = nvme_host::open(&setup.device).unwrap();
    let controller =
        nvme_host::Controller::start(opened, &nvme_host::ControllerConfig::default()).unwrap();
    let found: Vec<Nsid> = controller
        .info()
        .namespaces
        .iter()
        .map(|one| one.nsid)
        .collect();
    assert_eq!(found, [Nsid(1)]);
    assert_eq!(controller.namespaces().unwrap(), [Nsid(1)]);
    let mut namespace = controller.namespace(Nsid(1)).unwrap();
    namespace.write(Lba(0), &[5; BLOCK]).unwrap();
    let mut back = [0; BLOCK];
    namespace.read(Lba(0), &mut back).unwrap();
    assert_eq!(back, [5; BLOCK]);
}

#[test]
fn parts_of_log_pages_that_no_command_can_name_are_refused() {
    use nvme_host::core::spec::admin::LogOptions;
    let options = LogOptions::default();
    let (_setup, controller) = with(&[]);
    let read = |options, range| controller.log_page_range(2, Nsid::ALL, range, options, |_| ());
    refused(read(options, 512..1024), "does not take an offset");
    drop(controller);
    // LPA bit 2.
    let (_setup, controller) = with(&[(1, 261, 4)]);
    let by_index = LogOptions {
        index_offset: true,
        ..options
    };
    let read = controller.log_page_range(2, Nsid::ALL, 0..1 << 20, by_index, |_| ());
    refused(read, "cannot be split");
    // Counts of the queues that there are.
    assert!(controller.statistics().is_empty());
    let queue = controller.create_queue_pair(8).unwrap();
    assert_eq!(controller.statistics().len(), 1);
    let mut buffer = controller.alloc(8).unwrap();
    buffer.resize(4);
    assert!(!buffer.is_empty() && format!("{buffer:?}").contains("len: 4"));
    let many = nvme_host::DmaBuffer::several(controller.device(), 1 << 40, 1 << 40);
    refused(many, "do not fit into memory");
    drop(queue);
}

/// A controller that says how far a Format NVM is (FPI), in answers to Identify Namespace meanwhile.
#[test]
fn a_format_says_how_far_it_is() {
    // OACS bit 1.
    let (_setup, controller) = with(&[(1, 256, 2)]);
    let mut percents = Vec::new();
    let limit = Duration::from_secs(60);
    let settings = nvme_host::core::spec::admin::Format::new(0, 0);
    let now = controller.format(Nsid(1), settings, limit, |percent| percents.push(percent));
    assert_eq!(now.unwrap()[0].blocks, BLOCKS);
    // The answer to the second question may come after that to the format.
    assert!(
        percents == [10, 55] || percents == [10, 55, 78],
        "{percents:?}"
    );
    controller.shut_down().unwrap();
}
