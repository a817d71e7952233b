//! Faults on purpose: a device is removed, a reset happens under load, a transfer goes to an unmapped address.
//!
//! Each must end within its deadline in an error that names the fault, and the process continues.

use crate::exporter::Exporter;
use crate::{Outcome, patient, pattern, said};
use nvme_host::core::CommandData;
use nvme_host::core::spec::{Iova, Lba, Nsid, nvm};
use nvme_host::{
    Controller, ControllerConfig, Device, DmaBuffer, DmaPages, DriverQueue, Error, RingLocation,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

const BLOCKS: u32 = 8;
const DEPTH: usize = 16;
/// Time limit of a command while the function is reset.
pub const RESET_TIMEOUT: Duration = Duration::from_millis(500);

fn start(device: &str, timeout: Duration) -> Result<Controller, String> {
    start_on(
        nvme_host::open(device).map_err(said)?,
        timeout,
        RingLocation::Host,
    )
}

/// Brings the controller behind `device` up.
pub fn start_on(
    device: Arc<dyn Device>,
    timeout: Duration,
    rings: RingLocation,
) -> Result<Controller, String> {
    let config = ControllerConfig {
        timeout: patient(timeout),
        rings,
        ..ControllerConfig::default()
    };
    Controller::start(device, &config).map_err(said)
}

/// Reads from `leaving` until it is gone, then writes and reads `staying` from the same process.
///
/// The harness takes the device away when it sees the line that begins with `@monitor`.
pub fn unplug(leaving: &str, staying: &str, id: &str) -> Outcome {
    let other = start(staying, Duration::from_secs(5))?;
    let controller = start(leaving, Duration::from_secs(2))?;
    let mut load = Load::new(&controller, Nsid(1))?;
    load.turn()?.map_err(said)?;
    println!("@monitor device_del {id}");
    // The guest's hot-plug driver waits some seconds before it releases the device.
    let asked = Instant::now();
    let error = loop {
        if asked.elapsed() > patient(Duration::from_secs(40)) {
            return Err("the device is still there after 40 s".to_string());
        }
        if let Err(error) = load.turn()? {
            break error;
        }
    };
    println!("after {} ms: {error}", asked.elapsed().as_millis());
    if !matches!(error, Error::Gone { .. }) {
        return Err(format!("{error:?} instead of Error::Gone"));
    }
    drop(load);
    match controller.shut_down() {
        Err(Error::Gone { .. }) => {}
        other => return Err(format!("the shutdown of a device that is gone: {other:?}")),
    }
    round_trip(&other, 77)?;
    other.shut_down().map_err(said)
}

/// An error of the bus at the port above the function: commands that were lost end with an error, the same controller
/// works again, and so does the next opener.
pub fn bus_error(device: &str, port: &str, error: &str) -> Outcome {
    let controller = start(device, RESET_TIMEOUT)?;
    let mut load = Load::new(&controller, Nsid(1))?;
    load.turn()?.map_err(said)?;
    // The harness hands the line to QEMU's monitor.
    println!("@monitor pcie_aer_inject_error {port} {error}");
    let asked = Instant::now();
    let first = loop {
        if asked.elapsed() > patient(Duration::from_secs(60)) {
            return Err("no command has failed within 60 s".to_string());
        }
        if let Err(error) = load.turn()? {
            break error;
        }
    };
    println!("after {} ms: {first}", asked.elapsed().as_millis());
    if !matches!(first, Error::Timeout { .. }) {
        return Err(format!("{first:?} instead of Error::Timeout"));
    }
    while load.in_flight > 0 {
        match load.end()? {
            Ok(()) | Err(Error::Timeout { .. }) => {}
            Err(other) => return Err(format!("{other:?} instead of Error::Timeout")),
        }
    }
    drop(load);
    round_trip(&controller, 21)?;
    controller.shut_down().map_err(said)?;
    let controller = start(device, RESET_TIMEOUT)?;
    round_trip(&controller, 22)?;
    controller.shut_down().map_err(said)
}

/// Resets the function under a full queue, three times; afterwards everything works again.
pub fn reset(device: &str) -> Outcome {
    let controller = start(device, RESET_TIMEOUT)?;
    reset_under_load(&controller)?;
    controller.shut_down().map_err(said)
}

/// The same for a controller that was brought up with a time-out of [`RESET_TIMEOUT`].
pub fn reset_under_load(controller: &Controller) -> Outcome {
    for round in 0..3 {
        let mut load = Load::new(controller, Nsid(1))?;
        load.turn()?.map_err(said)?;
        load.submit()?;
        controller.device().reset().map_err(said)?;
        // A command that was not answered before the reset never will be, nor will one that is sent now.
        load.poll()?;
        load.submit()?;
        let began = Instant::now();
        let mut timeouts = 0;
        while load.in_flight > 0 {
            match load.end()? {
                Ok(()) => {}
                Err(Error::Timeout { .. }) => timeouts += 1,
                Err(other) => return Err(format!("round {round}: {other:?}")),
            }
        }
        // The time-out, the abort and the controller's reset have separate limits.
        if began.elapsed() > patient(Duration::from_secs(30)) {
            return Err(format!("round {round}: {:?} to recover", began.elapsed()));
        }
        if timeouts == 0 {
            return Err(format!("round {round}: every command was answered"));
        }
        println!(
            "round {round}: {timeouts} commands without an answer, all back after {} ms",
            began.elapsed().as_millis()
        );
        drop(load);
        round_trip(controller, round)?;
    }
    match controller.resets() {
        3.. => Ok(()),
        resets => Err(format!("{resets} controller resets")),
    }
}

/// An exporter revokes memory under a full queue: commands end with the cause, and a new start works. With `has_rings`
/// the queue's rings lie in that memory.
pub fn revoke(device: &str, has_rings: bool) -> Outcome {
    let exporter = Exporter::open()?;
    for round in 0..3 {
        let opened = nvme_host::open(device).map_err(said)?;
        let pages = DmaPages::of_file(exporter.export("good")?, 0, 16 << 20).map_err(said)?;
        let bar = DmaBuffer::over(&opened, Arc::new(pages)).map_err(said)?;
        let (bar, rings) = match has_rings {
            true => (
                None,
                RingLocation::Peer(Arc::new(bar.into_rings().map_err(said)?)),
            ),
            false => (Some(bar), RingLocation::Host),
        };
        let controller = start_on(opened, Duration::from_secs(2), rings)?;
        let mut load = Load::new(&controller, Nsid(1))?;
        load.turn()?.map_err(said)?;
        load.submit()?;
        exporter.revoke()?;
        let began = Instant::now();
        let cause = loop {
            match load.turn() {
                Ok(Ok(())) if began.elapsed() < patient(Duration::from_secs(20)) => {}
                Ok(Ok(())) => return Err(format!("round {round}: nothing ended within 20 s")),
                Ok(Err(error)) => break error.to_string(),
                Err(refused) => break refused,
            }
        };
        if !cause.contains("was taken back") {
            return Err(format!("round {round}: the cause is not said: {cause}"));
        }
        println!(
            "round {round}: ended after {} ms: {cause}",
            began.elapsed().as_millis()
        );
        drop((load, bar, controller));
        let controller = start(device, Duration::from_secs(2))?;
        round_trip(&controller, round)?;
        controller.shut_down().map_err(said)?;
    }
    Ok(())
}

/// Reads into an address that was never mapped: no memory of this process changes, and the data are not found in it.
pub fn confine(device: &str) -> Outcome {
    let controller = start(device, Duration::from_secs(2))?;
    let nsid = Nsid(1);
    let mut namespace = controller.namespace(nsid).map_err(said)?;
    let block = namespace.block_bytes() as usize;
    let bytes = (4 << 20) / block * block;
    let mut data = vec![0; bytes];
    pattern::fill(5, 0, &mut data);
    namespace.write(Lba(0), &data[..65536]).map_err(said)?;
    // The guards lie on both sides of the mappings, filled with another pattern.
    let mut guards = DmaBuffer::several(controller.device(), 65536, 8).map_err(said)?;
    for guard in &mut guards {
        pattern::fill(6, 0, guard.as_mut_slice());
    }
    let highest = guards.iter().map(|guard| guard.iova().0).max();
    let outside = Iova((highest.unwrap_or(0) + (1 << 30)).next_multiple_of(1 << 21));
    let mut queue = controller.create_queue_pair(16).map_err(said)?;
    let target = CommandData::Contiguous {
        iova: outside,
        len: 65536,
    };
    let read = nvm::read(nsid, Lba(0), (65536 / block) as u32);
    match queue.submit_data(read, target, None) {
        Err(refused) => println!("refused before it was sent: {}", refused.error),
        Ok(_) => {
            queue.ring();
            let done = queue.wait().map_err(said)?.ok_or("the command was lost")?;
            println!("the controller's answer: {:?}", done.outcome);
        }
    }
    for guard in &guards {
        if let Some(at) = pattern::difference(6, 0, guard.as_slice()) {
            return Err(format!("byte {at} of a guard was overwritten"));
        }
    }
    drop(queue);
    drop(namespace);
    round_trip(&controller, 9)?;
    controller.shut_down().map_err(said)
}

/// Writes and reads 64 KiB by blocking calls.
fn round_trip(controller: &Controller, seed: u64) -> Outcome {
    let mut namespace = controller.namespace(Nsid(1)).map_err(said)?;
    let mut data = vec![0; 65536];
    pattern::fill(seed, 0, &mut data);
    namespace.write(Lba(0), &data).map_err(said)?;
    data.fill(0);
    namespace.read(Lba(0), &mut data).map_err(said)?;
    match pattern::difference(seed, 0, &data) {
        None => Ok(()),
        Some(at) => Err(format!("byte {at} differs after a round trip")),
    }
}

/// A queue kept full of reads.
struct Load {
    queue: DriverQueue,
    nsid: Nsid,
    free: Vec<DmaBuffer>,
    in_flight: usize,
}

impl Load {
    fn new(controller: &Controller, nsid: Nsid) -> Result<Self, String> {
        let block = controller.namespace(nsid).map_err(said)?.block_bytes();
        let bytes = (block * BLOCKS) as usize;
        Ok(Self {
            queue: controller.create_queue_pair(64).map_err(said)?,
            nsid,
            free: DmaBuffer::several(controller.device(), bytes, DEPTH).map_err(said)?,
            in_flight: 0,
        })
    }

    fn submit(&mut self) -> Outcome {
        while let Some(buffer) = self.free.pop() {
            let read = nvm::read(self.nsid, Lba(8 * self.in_flight as u64), BLOCKS);
            let submitted = self.queue.submit(read, Some(buffer));
            submitted.map_err(|refused| refused.error.to_string())?;
            self.in_flight += 1;
        }
        self.queue.ring();
        Ok(())
    }

    /// Takes back the buffers of commands that have been answered.
    fn poll(&mut self) -> Outcome {
        while let Some(done) = self.queue.poll().map_err(said)? {
            self.in_flight -= 1;
            self.free.extend(done.buffer);
        }
        Ok(())
    }

    /// Waits for one command. The inner error is the device's, the outer one a fault of the test.
    fn end(&mut self) -> Result<Result<(), Error>, String> {
        match self.queue.wait() {
            Ok(None) => Err("a command was lost".to_string()),
            Err(error) => Ok(Err(error)),
            Ok(Some(mut done)) => {
                self.in_flight -= 1;
                self.free.extend(done.buffer.take());
                if done.is_success() || done.may_retry() {
                    return Ok(Ok(()));
                }
                Ok(Err(self.queue.error_of(&done, "Read")))
            }
        }
    }

    /// Fills the queue and empties it once.
    fn turn(&mut self) -> Result<Result<(), Error>, String> {
        self.submit()?;
        while self.in_flight > 0 {
            if let Err(error) = self.end()? {
                return Ok(Err(error));
            }
        }
        Ok(Ok(()))
    }
}
