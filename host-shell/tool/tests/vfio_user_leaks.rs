//! Checks what a lost server leaves behind in this process. This test has a file of its own,
//! because tests in one process would change its count of descriptors.
#![cfg(all(feature = "sim", feature = "vfio-user"))]

mod common;

use common::{Scratch, Server, binary};
use nvme_host::core::spec::{Lba, Nsid, nvm};
use nvme_host::{Controller, ControllerConfig, Error};

/// Descriptors and mappings of the memory that is shared with servers.
fn shared() -> (usize, usize) {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (descriptors, maps.matches("nvme-gpu-dma").count())
}

#[test]
fn memory_of_commands_that_a_lost_server_had_is_freed() {
    let folder = Scratch::new();
    let socket = folder.0.join("cntrl");
    let before = shared();
    // Lost under I/O, under an admin command, and under a bring-up.
    for (device, during) in [
        ("sim:mem?fault=drop@op=read", "read"),
        ("sim:mem?fault=drop@op=read&hmpre=256&hmmin=16", "read"),
        ("sim:mem?fault=drop@op=get-log-page", "log"),
        ("sim:mem?fault=drop@op=identify", "start"),
    ] {
        let _ = std::fs::remove_file(&socket);
        let mut server = Server::start(binary(), device, &socket).unwrap();
        let opened = nvme_host::open(&server.device()).unwrap();
        let killer = |mut server: Server| {
            std::thread::spawn(move || {
                std::thread::sleep(std::time::Duration::from_millis(50));
                server.kill();
            })
        };
        let config = ControllerConfig::default();
        if during == "start" {
            let killed = killer(server);
            let started = Controller::start(opened, &config);
            assert!(matches!(started.map(drop), Err(Error::Gone { .. })));
            killed.join().unwrap();
        } else if during == "log" {
            let controller = Controller::start(opened, &config).unwrap();
            let killed = killer(server);
            let log = controller.log_page(2, Nsid::ALL, 512);
            assert!(matches!(log, Err(Error::Gone { .. })), "{log:?}");
            killed.join().unwrap();
        } else {
            let controller = Controller::start(opened, &config).unwrap();
            let mut queue = controller.create_queue_pair(16).unwrap();
            for lba in 0..8 {
                let buffer = controller.alloc(4096).unwrap();
                let read = nvm::read(Nsid(1), Lba(lba), 1);
                queue.submit(read, Some(buffer)).unwrap();
            }
            queue.ring();
            assert!(shared().1 > before.1, "there is memory to free");
            server.kill();
            // Dropping the server closes its pipes, which belong to this process.
            drop(server);
            assert!(matches!(queue.wait(), Err(Error::Gone { .. })));
        }
        assert_eq!(shared(), before, "{device}");
    }
}
