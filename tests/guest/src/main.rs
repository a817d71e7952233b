//! Tests of the driver on any `--device`, for the guest: each subcommand is one test and exits with 0 if it passed.
//! They write to the namespace that they get.

mod exporter;
mod gathers;
mod gdrdrv;
mod mixed;
mod peer;
mod queues;
mod refusals;
mod rings;
mod spdk;
mod transfers;
mod trouble;
mod volume;

use guest_tests::contract::{self, Subject};
use guest_tests::{Outcome, config, patient, pattern, said};
use nvme_host::core::spec::Nsid;
use nvme_host::{Controller, ControllerConfig};
use std::process::{Command, ExitCode};

const USAGE: &str = "\
usage: guest-tests <test>
  store SEED MIB DISK         write the pattern through Linux's block device
  compare SEED MIB DISK       read it back there and compare
  fill DEVICE NSID SEED MIB   write the pattern to the first MIB mebibytes of a namespace
  check DEVICE NSID SEED MIB  read it back and compare
  transfers DEVICE NSID       sizes and offsets around every boundary, by PRP and SGL
  queues DEVICE NSID          the smallest queue, the largest, all of them at once
  refusals DEVICE NSID        commands that the controller must refuse
  peer DEVICE RESOURCE MIB    transfers with the memory of another PCI device, or of a dma-buf of
                              this machine's memory (RESOURCE: udmabuf), or of a BAR by the test exporter
                              (RESOURCE: exporter:good, exporter:raw), or of a BAR that VFIO exports
                              (RESOURCE: vfio:BDF?bar=N)
  rings DEVICE RESOURCE       the same with the rings of the queues there, too: sizes, wraps
  rings-reset DEVICE RESOURCE resets under a full queue whose rings lie there
  gdrdrv DEVICE RESOURCE      transfers with GPU memory by gdrdrv, whose stand-in maps the BAR RESOURCE
  no-gdrdrv DEVICE TEXT       such memory is refused, for the reason TEXT
  no-peer DEVICE RESOURCE TEXT
                              memory of a peer is refused, for the reason TEXT
  exporter BDF                a BAR as a dma-buf: good and wrong addresses, and memory that is taken back
  revoke DEVICE data|rings    I/O while an exporter takes back memory that holds data, or rings
  gathers DEVICE TIER         rows to and from memory of a GPU, whose data the GPU reaches by TIER
  gathers-reset DEVICE TIER   the same with resets of the function in between
  spdk SEED MIB               gpu_queue_init() of the device NVME_GPU_DEVICE, which holds the pattern, and reads after it
  unplug DEVICE OTHER ID      I/O while QEMU takes the device ID away, then I/O on another
  bus-error DEVICE PORT ERROR I/O while QEMU's device PORT, the port above, has an error of the bus
  reset DEVICE                I/O while the function is reset
  contract DEVICE COMMAND     what every device promises; COMMAND of a shell takes it away at the end
  confine DEVICE              a transfer to an address that was never mapped
  mixed DEVICE NSID SECONDS SEED
                              random verified I/O, and a look for leaks
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let result = match words.as_slice() {
        [test @ ("store" | "compare"), seed, mib, path] => number(seed)
            .and_then(|seed| Ok((seed, number(mib)?)))
            .and_then(|(seed, mib)| match *test {
                "store" => volume::store(seed, mib, path),
                _ => volume::compare(seed, mib, path),
            }),
        [test @ ("fill" | "check"), device, nsid, seed, mib] => {
            volume(test, device, nsid, seed, mib)
        }
        [test @ ("transfers" | "queues" | "refusals"), device, nsid] => on(device, |controller| {
            let nsid = Nsid(number(nsid)? as u32);
            match *test {
                "transfers" => transfers::run(controller, nsid),
                "refusals" => refusals::run(controller, nsid),
                _ => queues::run(controller, nsid),
            }
        }),
        ["peer", device, resource, mib] => on(device, |controller| {
            peer::run(controller, resource, number(mib)?)
        }),
        ["gathers", device, tier] => {
            number(tier).and_then(|tier| gathers::run(device, tier as u32))
        }
        ["spdk", seed, mib] => number(seed).and_then(|seed| spdk::run(seed, number(mib)?)),
        ["gathers-reset", device, tier] => {
            number(tier).and_then(|tier| gathers::reset(device, tier as u32))
        }
        ["unplug", leaving, staying, id] => trouble::unplug(leaving, staying, id),
        ["bus-error", device, port, error] => trouble::bus_error(device, port, error),
        ["reset", device] => trouble::reset(device),
        ["exporter", address] => exporter::run(address),
        ["gdrdrv", device, resource] => gdrdrv::run(device, resource),
        ["no-gdrdrv", device, part] => gdrdrv::without(device, part),
        ["no-peer", device, resource, part] => peer::refused(device, resource, part),
        ["rings", device, resource] => rings::run(device, resource),
        ["rings-reset", device, resource] => rings::reset(device, resource),
        ["revoke", device, what @ ("data" | "rings")] => trouble::revoke(device, *what == "rings"),
        ["contract", device, command] => contract(device, command),
        ["confine", device] => trouble::confine(device),
        ["mixed", device, nsid, seconds, seed] => number(nsid).and_then(|nsid| {
            mixed::run(device, Nsid(nsid as u32), number(seconds)?, number(seed)?)
        }),
        _ => Err(USAGE.to_string()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(cause) => {
            eprintln!("guest-tests: {cause}");
            ExitCode::FAILURE
        }
    }
}

fn volume(test: &str, device: &str, nsid: &str, seed: &str, mib: &str) -> Outcome {
    let (nsid, seed, mib) = (Nsid(number(nsid)? as u32), number(seed)?, number(mib)?);
    on(device, |controller| {
        let mut namespace = controller.namespace(nsid).map_err(said)?;
        match test {
            "fill" => volume::fill(&mut namespace, seed, mib),
            _ => volume::check(&mut namespace, seed, mib),
        }
    })
}

/// Brings the controller up for a test, and shuts it down after one that passed.
fn on(device: &str, test: impl FnOnce(&Controller) -> Outcome) -> Outcome {
    let config = ControllerConfig {
        queue_pairs: 64,
        max_transfer: 8 << 20,
        ..config()
    };
    let device = nvme_host::open(device).map_err(said)?;
    let controller = Controller::start(device, &config).map_err(said)?;
    test(&controller)?;
    if controller.resets() != 0 {
        return Err(format!("{} controller resets", controller.resets()));
    }
    controller.shut_down().map_err(said)
}

fn number(text: &str) -> Result<u64, String> {
    text.parse()
        .map_err(|_| format!("'{text}' is not a number"))
}

/// Runs the contract on a device that one program at a time can open, behind an IOMMU; `command` removes it.
fn contract(device: &str, command: &str) -> Outcome {
    let lose = || -> Outcome {
        // It waits until this process closes the device.
        let shell = Command::new("sh").args(["-c", command]).spawn();
        shell.map(drop).map_err(|error| format!("sh: {error}"))
    };
    contract::run(&Subject {
        open: &|| nvme_host::open(device),
        // VFIO lets the process that has the group open the device once more, but not through the device's own node.
        is_exclusive: device.starts_with("kmod:") || device.ends_with("iommu=iommufd"),
        confines: true,
        lose: Some(&lose),
    })
}
