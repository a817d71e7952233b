//! The contract of `Device` on the transports that need no kernel of their own.

use guest_tests::contract::{self, Subject};
use nvme_host::relay::DoorbellRelay;
use nvme_host::{Device, sim};
use nvme_sim::vfio_user::{Server, Stopper};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// Returns a device that others can open, too, and that only `leave` can remove.
fn plain(open: &dyn Fn() -> nvme_host::Result<Arc<dyn Device>>) -> Subject<'_> {
    Subject {
        open,
        is_exclusive: false,
        confines: true,
        lose: None,
    }
}

#[test]
fn the_simulator_keeps_the_contract() {
    let open = || nvme_host::open("sim:mem?size=64MiB");
    contract::run(&plain(&open)).unwrap();
}

#[test]
fn an_image_keeps_the_contract_and_has_one_user() {
    let folder = Folder::new("image");
    let name = format!("sim:{}?size=64MiB", folder.0.join("d.img").display());
    let open = || nvme_host::open(&name);
    let subject = Subject {
        is_exclusive: true,
        ..plain(&open)
    };
    contract::run(&subject).unwrap();
}

#[test]
fn relayed_doorbells_keep_the_contract() {
    let open = || -> nvme_host::Result<Arc<dyn Device>> {
        let relay = DoorbellRelay::start(nvme_host::open("sim:mem?size=64MiB")?, 64)?;
        Ok(relay)
    };
    contract::run(&plain(&open)).unwrap();
}

/// A controller in this process behind a socket, which serves one client after the other.
struct Served {
    stopper: Mutex<Option<(Stopper, JoinHandle<()>)>>,
    folder: Folder,
}

impl Served {
    fn new(name: &str) -> Self {
        let folder = Folder::new(name);
        let config = sim::config("mem?size=64MiB").unwrap();
        let mut server = Server::bind(config, &folder.0.join("cntrl"), 1).unwrap();
        let stopper = server.stopper();
        let thread = std::thread::spawn(move || while let Ok(Some(_)) = server.serve_one() {});
        Self {
            stopper: Mutex::new(Some((stopper, thread))),
            folder,
        }
    }

    fn name(&self) -> String {
        format!("vfio-user:{}", self.folder.0.join("cntrl").display())
    }

    fn stop(&self) {
        if let Some((stopper, thread)) = self.stopper.lock().unwrap().take() {
            stopper.stop();
            thread.join().unwrap();
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop();
    }
}

#[test]
fn a_controller_behind_a_socket_keeps_the_contract() {
    let served = Served::new("left");
    let open = || nvme_host::open(&served.name());
    let subject = Subject {
        confines: false,
        ..plain(&open)
    };
    contract::run(&subject).unwrap();
}

#[test]
fn a_server_that_dies_ends_everything_with_a_cause() {
    let served = Served::new("dies");
    let lose = || {
        served.stop();
        Ok(())
    };
    let open = || nvme_host::open(&served.name());
    let subject = Subject {
        confines: false,
        lose: Some(&lose),
        ..plain(&open)
    };
    contract::run(&subject).unwrap();
}

/// A folder of a test, removed at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("nvme-gpu-contract-{}-{name}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
