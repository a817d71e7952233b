//! Selection of the tier, which is how directly the GPU drives a controller: tier 0 by doorbells that a host thread
//! relays, 1 by mapped doorbells, 2 with data in GPU memory, 3 with rings in GPU memory. The reason why no higher
//! tier is used is kept for messages.

use super::data::GpuData;
use super::driver::{Gpu, WriteOrder};
use super::registered::RegisteredMemory;
use super::ring_shadow::RingShadow;
use nvme_driver::device::Device;
use nvme_driver::device::relay::DoorbellRelay;
use nvme_driver::device::ring_memory::RingMemory;
use nvme_driver::error::{Error, Result};
use nvme_driver::lock::lock;
use std::sync::{Arc, Mutex, Weak};

/// Placement of doorbells, data and rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum QueueTier {
    /// Doorbells are words that a host thread passes on; data is in host memory.
    Relayed,
    /// The GPU rings the mapped doorbells; data is in host memory.
    Direct,
    /// The GPU rings the mapped doorbells; data is in GPU memory.
    GpuMemory,
    /// The same, and rings of its queues are in GPU memory, too.
    GpuRings,
}

impl QueueTier {
    /// Returns the number in docs/hardware.md.
    pub fn number(self) -> u32 {
        self as u32
    }
}

/// Tier that the user requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TierRequest {
    /// The highest tier that works; the tier of GPU memory only if the work wants its data there.
    Auto {
        /// True if data in GPU memory is preferred.
        gpu_memory: bool,
    },
    /// This one or an error.
    Exactly(QueueTier),
}

/// The GPU's access to a device.
pub struct GpuAccess {
    gpu: Arc<Gpu>,
    device: Arc<dyn Device>,
    doorbells: RegisteredMemory,
    relay: Option<Arc<DoorbellRelay>>,
    /// Registration of controller memory with the GPU, while something lies there: the driver registers it only once.
    controller_memory: Mutex<Weak<RegisteredMemory>>,
    tier: QueueTier,
    why: String,
}

impl GpuAccess {
    /// Selects the access to `device`, whose queue pairs 1 to `queues` the GPU will use.
    ///
    /// # Errors
    /// [`Error::Device`] when the tier asked for does not work, with the reason.
    pub fn find(
        gpu: &Arc<Gpu>,
        device: Arc<dyn Device>,
        queues: u16,
        request: TierRequest,
    ) -> Result<Self> {
        let direct = match request {
            TierRequest::Exactly(QueueTier::Relayed) => None,
            _ => Some(RegisteredMemory::doorbells(gpu, &device)),
        };
        let reason = match direct {
            Some(Ok(doorbells)) => {
                let data = match request {
                    TierRequest::Exactly(QueueTier::Direct)
                    | TierRequest::Auto { gpu_memory: false } => None,
                    TierRequest::Exactly(QueueTier::GpuRings) if !device.reaches_peers() => {
                        Some(Err(no_rings(&*device)))
                    }
                    _ => Some(reaches_gpu_memory(gpu, &device)),
                };
                let (tier, why) = choose(request, Ok(()), data)?;
                let what = match doorbells.is_io() {
                    true => "the BAR",
                    false => "the doorbell memory",
                };
                return Ok(Self {
                    gpu: Arc::clone(gpu),
                    device,
                    doorbells,
                    relay: None,
                    controller_memory: Mutex::default(),
                    tier,
                    why: format!("the GPU stores to {what} itself; {why}"),
                });
            }
            Some(Err(error)) => choose(request, Err(error), None)?.1,
            None => "as asked".to_owned(),
        };
        // One more doorbell pair than the GPU's queues, for a queue of the CPU, if the controller has it.
        let relay = DoorbellRelay::start(Arc::clone(&device), queues.saturating_add(1))
            .or_else(|_| DoorbellRelay::start(device, queues))?;
        let device: Arc<dyn Device> = Arc::clone(&relay) as _;
        Ok(Self {
            gpu: Arc::clone(gpu),
            device,
            doorbells: RegisteredMemory::relay(gpu, &relay)?,
            relay: Some(relay),
            controller_memory: Mutex::default(),
            tier: QueueTier::Relayed,
            why: format!("a host thread passes doorbells on ({reason})"),
        })
    }

    /// Returns the device to start the controller on: relayed in tier 0.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Returns the GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Returns the tier in use.
    pub fn tier(&self) -> QueueTier {
        self.tier
    }

    /// Describes the tier and the reason for it.
    pub fn describe(&self) -> String {
        format!("tier {}: {}", self.tier.number(), self.why)
    }

    /// Writes that the relay passed on, where there is one.
    pub fn forwarded(&self) -> Option<u64> {
        self.relay.as_ref().map(|relay| relay.forwarded())
    }

    /// Returns the GPU's address of the doorbell that the host has at `host`.
    pub(super) fn doorbell(&self, host: u64) -> Result<u64> {
        self.doorbells.translate(host)
    }

    /// Returns `bytes` bytes that the controller writes while kernels wait for them: GPU memory if the tier has it and
    /// no thread of this process takes part in the transfer (docs/adr/0008).
    ///
    /// # Errors
    /// As [`data`](Self::data).
    pub(super) fn slots(&self, bytes: usize) -> Result<GpuData> {
        match self.device.reaches_peers() {
            true => self.data(bytes),
            false => GpuData::pinned(&self.gpu, &self.device, bytes),
        }
    }

    /// Allocates GPU memory for the rings, if the tier places them there; `shape` is the number of pairs, the entries
    /// of each and the bytes of a page.
    ///
    /// # Errors
    /// As [`data`](Self::data).
    pub(super) fn rings(&self, shape: (u32, u32, u64)) -> Result<Option<Arc<RingShadow>>> {
        if self.tier != QueueTier::GpuRings {
            return Ok(None);
        }
        RingShadow::new(&self.gpu, &self.device, shape).map(|rings| Some(Arc::new(rings)))
    }

    /// Returns the GPU's view of controller memory, or of a peer's, in which rings or data lie.
    ///
    /// # Errors
    /// As [`RegisteredMemory::ring_memory`].
    pub(super) fn registered(&self, memory: &Arc<RingMemory>) -> Result<Arc<RegisteredMemory>> {
        let mut known = lock(&self.controller_memory);
        if let Some(registered) = known.upgrade() {
            return Ok(registered);
        }
        let registered = Arc::new(RegisteredMemory::ring_memory(&self.gpu, memory)?);
        *known = Arc::downgrade(&registered);
        Ok(registered)
    }

    /// Returns `bytes` bytes of controller memory for data.
    ///
    /// # Errors
    /// As [`GpuData::in_controller`].
    pub(super) fn data_in_controller(&self, bytes: usize) -> Result<GpuData> {
        GpuData::in_controller(&self.device, bytes, |memory| self.registered(memory))
    }

    /// Returns `bytes` bytes of data memory where the tier places it.
    ///
    /// # Errors
    /// [`Error::Device`] and [`Error::System`] when there is none.
    pub fn data(&self, bytes: usize) -> Result<GpuData> {
        match self.tier {
            QueueTier::GpuMemory | QueueTier::GpuRings => {
                GpuData::on_gpu(&self.gpu, &self.device, bytes)
            }
            _ => GpuData::pinned(&self.gpu, &self.device, bytes),
        }
    }
}

/// Selects the tier, with the reason, from the features that work: the doorbells, and GPU memory if it was tried.
fn choose(
    request: TierRequest,
    doorbells: Result<()>,
    memory: Option<Result<()>>,
) -> Result<(QueueTier, String)> {
    let wanted = match request {
        TierRequest::Exactly(tier) => Some(tier),
        TierRequest::Auto { .. } => None,
    };
    if let Err(error) = doorbells {
        return match wanted {
            Some(tier) if tier > QueueTier::Relayed => Err(Error::environment(
                format!("tier {} does not work here: {error}", tier.number()),
                "use --tier 0",
            )),
            _ => Ok((QueueTier::Relayed, error.to_string())),
        };
    }
    match (wanted, memory) {
        (Some(tier @ (QueueTier::GpuMemory | QueueTier::GpuRings)), Some(Err(error))) => {
            Err(Error::environment(
                format!("tier {} does not work here: {error}", tier.number()),
                "use --tier 1 or 0",
            ))
        }
        (Some(QueueTier::GpuRings), Some(Ok(()))) => Ok((
            QueueTier::GpuRings,
            "the controller reaches GPU memory, where the rings lie, too".to_owned(),
        )),
        (_, Some(Ok(()))) => Ok((
            QueueTier::GpuMemory,
            "the controller reaches GPU memory".to_owned(),
        )),
        (_, Some(Err(error))) => Ok((
            QueueTier::Direct,
            format!("data is in host memory, because {error}"),
        )),
        (None, None) => Ok((
            QueueTier::Direct,
            "data is in host memory, where the CPU uses it".to_owned(),
        )),
        (Some(_), None) => Ok((
            QueueTier::Direct,
            "data is in host memory, as asked".to_owned(),
        )),
    }
}

fn no_rings(device: &dyn Device) -> Error {
    Error::usage(
        format!(
            "{} does not read and write GPU memory by itself, and rings there need that",
            device.name()
        ),
        "use --tier 2 or lower",
    )
}

/// Tests whether the controller can access GPU memory.
fn reaches_gpu_memory(gpu: &Arc<Gpu>, device: &Arc<dyn Device>) -> Result<()> {
    if gpu.writes_ordering()? == WriteOrder::None {
        return Err(Error::environment(
            "this GPU does not order other devices' writes (GPU_DIRECT_RDMA_WRITES_ORDERING is NONE)",
            "use --tier 1",
        ));
    }
    GpuData::on_gpu(gpu, device, 64 << 10).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn no(what: &str) -> Error {
        Error::environment(what, "nothing")
    }

    #[test]
    fn the_highest_tier_that_works_is_chosen_and_says_why() {
        let any = TierRequest::Auto { gpu_memory: true };
        let (tier, why) = choose(any, Ok(()), Some(Ok(()))).unwrap();
        assert_eq!(
            (tier, why.contains("reaches")),
            (QueueTier::GpuMemory, true)
        );
        let (tier, why) = choose(any, Ok(()), Some(Err(no("no peers")))).unwrap();
        assert_eq!((tier, why.contains("no peers")), (QueueTier::Direct, true));
        let (tier, why) = choose(any, Err(no("follow_pfn")), None).unwrap();
        assert_eq!(
            (tier, why.contains("follow_pfn")),
            (QueueTier::Relayed, true)
        );
    }

    #[test]
    fn a_tier_that_was_asked_for_is_that_one_or_an_error() {
        let exactly = TierRequest::Exactly;
        let (tier, _) = choose(exactly(QueueTier::Direct), Ok(()), None).unwrap();
        assert_eq!(tier, QueueTier::Direct);
        let (tier, why) = choose(exactly(QueueTier::GpuRings), Ok(()), Some(Ok(()))).unwrap();
        assert_eq!((tier, why.contains("rings")), (QueueTier::GpuRings, true));
        for tier in [QueueTier::Direct, QueueTier::GpuMemory, QueueTier::GpuRings] {
            let error = choose(exactly(tier), Err(no("refused")), None).unwrap_err();
            assert!(error.to_string().contains("refused"), "{error}");
        }
        for tier in [QueueTier::GpuMemory, QueueTier::GpuRings] {
            let error = choose(exactly(tier), Ok(()), Some(Err(no("x")))).unwrap_err();
            let text = format!("tier {} does not work", tier.number());
            assert!(error.to_string().contains(&text), "{error}");
        }
    }
}
