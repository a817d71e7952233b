//! Read blocks of a simulated drive, first the easy way, then with commands in flight on a queue.
//!
//! `cargo run --release -p nvme-host --example read_blocks [DEVICE]`, for example `sim:disk.img`.

use nvme_host::core::spec::{Lba, Nsid, nvm};
use nvme_host::{Controller, ControllerConfig, Error, Result};

fn main() -> std::process::ExitCode {
    match run() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}: {}", error.remedy());
            std::process::ExitCode::from(error.exit_code())
        }
    }
}

fn run() -> Result<()> {
    let name = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "sim:mem?size=16MiB".to_owned());
    let controller = Controller::start(nvme_host::open(&name)?, &ControllerConfig::default())?;

    // Blocking: any range; split by what the controller and the namespace allow.
    let mut namespace = controller.namespace(Nsid(1))?;
    let block = namespace.block_bytes() as usize;
    let mut data = vec![0; 8 * block];
    namespace.read(Lba(0), &mut data)?;
    println!(
        "{name}: 8 blocks of {block} bytes, {} of them not zero",
        data.iter().filter(|byte| **byte != 0).count()
    );

    // Queued: four reads in flight. A buffer belongs to its command until `wait` gives it back.
    let mut queue = controller.create_queue_pair(16)?;
    for lba in 0..4 {
        let buffer = controller.alloc(block)?;
        let read = nvm::read(Nsid(1), Lba(lba), 1);
        queue
            .submit(read, Some(buffer))
            .map_err(|refused| Error::device(refused.error.to_string(), "poll first"))?;
    }
    queue.ring();
    while let Some(done) = queue.wait()? {
        if !done.is_success() {
            return Err(queue.error_of(&done, "Read"));
        }
        println!("command {} is done: {:?}", done.cid, done.buffer);
    }
    drop(queue);
    drop(namespace);
    controller.shut_down()
}
