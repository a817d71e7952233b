//! How near the GPU gets to a controller: which tier is used, and why not a higher one.

#[cfg(feature = "sim")]
use super::copier::Copier;
use super::driver::{Gpu, Order};
use super::memory::DeviceMemory;
use super::registered::Registered;
use crate::device::Device;
use crate::device::peer::PeerMemory;
use crate::device::relay::Relay;
use crate::dma::DmaBuffer;
use crate::error::{Error, Result};
use nvme_core::spec::Iova;
use std::sync::Arc;

/// Memory that is exported is a multiple of this: the driver puts such allocations at whole pages.
const EXPORTED: usize = 2 << 20;

/// Where doorbells and data are. Rings are in host memory in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    /// Doorbells are words that a host thread passes on; data is in host memory.
    Relayed,
    /// The GPU rings by itself; data is in host memory.
    Direct,
    /// The GPU rings by itself; data is in GPU memory.
    GpuMemory,
}

impl Tier {
    /// The number in docs/hardware.md.
    pub fn number(self) -> u32 {
        self as u32
    }
}

/// Which tier the user wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TierRequest {
    /// The highest that works, GPU memory only where the work wants its data there.
    Auto {
        /// Whether data in GPU memory is preferred.
        gpu_memory: bool,
    },
    /// This one or an error.
    Exactly(Tier),
}

/// A device as the GPU reaches it.
pub struct Access {
    gpu: Arc<Gpu>,
    device: Arc<dyn Device>,
    doorbells: Registered,
    relay: Option<Arc<Relay>>,
    tier: Tier,
    why: String,
}

impl Access {
    /// Finds a way to `device`, whose queue pairs 1 to `queues` the GPU will use.
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
            TierRequest::Exactly(Tier::Relayed) => None,
            _ => Some(Registered::doorbells(gpu, &device)),
        };
        let reason = match direct {
            Some(Ok(doorbells)) => {
                let data = match request {
                    TierRequest::Exactly(Tier::Direct)
                    | TierRequest::Auto { gpu_memory: false } => None,
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
                    tier,
                    why: format!("the GPU stores to {what} itself; {why}"),
                });
            }
            Some(Err(error)) => choose(request, Err(error), None)?.1,
            None => "as asked".to_owned(),
        };
        // One more for a queue of the CPU beside the GPU's, where the controller has it.
        let relay = Relay::start(Arc::clone(&device), queues.saturating_add(1))
            .or_else(|_| Relay::start(device, queues))?;
        let device: Arc<dyn Device> = Arc::clone(&relay) as _;
        Ok(Self {
            gpu: Arc::clone(gpu),
            device,
            doorbells: Registered::relay(gpu, &relay)?,
            relay: Some(relay),
            tier: Tier::Relayed,
            why: format!("a host thread passes doorbells on ({reason})"),
        })
    }

    /// The device to start the controller on: relayed in tier 0.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// The GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// The tier in use.
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// Tier and reason, for people.
    pub fn describe(&self) -> String {
        format!("tier {}: {}", self.tier.number(), self.why)
    }

    /// Writes that the relay passed on, where there is one.
    pub fn forwarded(&self) -> Option<u64> {
        self.relay.as_ref().map(|relay| relay.forwarded())
    }

    /// The GPU's address of the doorbell that the host has at `host`.
    pub(super) fn doorbell(&self, host: u64) -> Result<u64> {
        self.doorbells.translate(host)
    }

    /// `bytes` bytes that the controller writes while kernels wait for that: GPU memory where the tier has it and no
    /// thread of this process has a part in the transfer (docs/adr/0008).
    ///
    /// # Errors
    /// As [`data`](Self::data).
    pub(super) fn slots(&self, bytes: usize) -> Result<GpuData> {
        match self.device.reaches_peers() {
            true => self.data(bytes),
            false => GpuData::pinned(&self.gpu, &self.device, bytes),
        }
    }

    /// `bytes` bytes of data memory where the tier has it.
    ///
    /// # Errors
    /// [`Error::Device`] and [`Error::System`] when there is none.
    pub fn data(&self, bytes: usize) -> Result<GpuData> {
        match self.tier {
            Tier::GpuMemory => GpuData::on_gpu(&self.gpu, &self.device, bytes),
            _ => GpuData::pinned(&self.gpu, &self.device, bytes),
        }
    }
}

/// The tier and the reason, from what works: the doorbells, and GPU memory where it was tried.
fn choose(
    request: TierRequest,
    doorbells: Result<()>,
    memory: Option<Result<()>>,
) -> Result<(Tier, String)> {
    let wanted = match request {
        TierRequest::Exactly(tier) => Some(tier),
        TierRequest::Auto { .. } => None,
    };
    if let Err(error) = doorbells {
        return match wanted {
            Some(tier) if tier > Tier::Relayed => Err(Error::environment(
                format!("tier {} does not work here: {error}", tier.number()),
                "use --tier 0",
            )),
            _ => Ok((Tier::Relayed, error.to_string())),
        };
    }
    match (wanted, memory) {
        (Some(Tier::GpuMemory), Some(Err(error))) => Err(Error::environment(
            format!("tier 2 does not work here: {error}"),
            "use --tier 1 or 0",
        )),
        (_, Some(Ok(()))) => Ok((
            Tier::GpuMemory,
            "the controller reaches GPU memory".to_owned(),
        )),
        (_, Some(Err(error))) => Ok((
            Tier::Direct,
            format!("data is in host memory, because {error}"),
        )),
        (None, None) => Ok((
            Tier::Direct,
            "data is in host memory, where the CPU uses it".to_owned(),
        )),
        (Some(_), None) => Ok((Tier::Direct, "data is in host memory, as asked".to_owned())),
    }
}

/// Tries whether the controller can be given GPU memory.
fn reaches_gpu_memory(gpu: &Arc<Gpu>, device: &Arc<dyn Device>) -> Result<()> {
    if gpu.writes_ordering()? == Order::None {
        return Err(Error::environment(
            "this GPU does not order other devices' writes (GPU_DIRECT_RDMA_WRITES_ORDERING is NONE)",
            "use --tier 1",
        ));
    }
    GpuData::on_gpu(gpu, device, 64 << 10).map(drop)
}

/// Data memory that the controller and the GPU reach.
pub enum GpuData {
    /// Host memory, registered with the GPU.
    Pinned {
        /// The GPU's view of it.
        registered: Registered,
        /// The memory, as the CPU has it.
        buffer: DmaBuffer,
    },
    /// GPU memory, mapped at the device.
    OnGpu {
        /// The memory.
        memory: Arc<DeviceMemory>,
        /// Where the controller finds it.
        iova: Iova,
        /// Where it is mapped.
        device: Arc<dyn Device>,
    },
}

impl GpuData {
    /// Host memory of `bytes` bytes.
    pub fn pinned(gpu: &Arc<Gpu>, device: &Arc<dyn Device>, bytes: usize) -> Result<Self> {
        let buffer = DmaBuffer::new(device, bytes)?;
        let registered = Registered::pages(gpu, buffer.pages())?;
        Ok(Self::Pinned { buffer, registered })
    }

    /// GPU memory of `bytes` bytes, or more: what is exported is rounded up.
    pub fn on_gpu(gpu: &Arc<Gpu>, device: &Arc<dyn Device>, bytes: usize) -> Result<Self> {
        let bytes = match device.reaches_peers() {
            true => bytes.next_multiple_of(EXPORTED),
            false => bytes,
        };
        let memory = Arc::new(DeviceMemory::new(gpu, bytes)?);
        let iova = device.map_peer(PeerMemory {
            address: memory.address(),
            bytes,
            dma_buf: {
                let memory = Arc::clone(&memory);
                Box::new(move || memory.dma_buf())
            },
            #[cfg(feature = "sim")]
            copier: {
                let memory = Arc::clone(&memory);
                Box::new(move |images, owner| Ok(Arc::new(Copier::new(&memory, images, owner)?)))
            },
        })?;
        Ok(Self::OnGpu {
            memory,
            iova,
            device: Arc::clone(device),
        })
    }

    /// The GPU's address of the first byte.
    pub fn address(&self) -> u64 {
        match self {
            Self::Pinned { registered, .. } => registered.address(),
            Self::OnGpu { memory, .. } => memory.address(),
        }
    }

    /// The controller's address of the first byte.
    pub fn iova(&self) -> Iova {
        match self {
            Self::Pinned { buffer, .. } => buffer.iova(),
            Self::OnGpu { iova, .. } => *iova,
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Pinned { buffer, .. } => buffer.len(),
            Self::OnGpu { memory, .. } => memory.len(),
        }
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies bytes from `offset` on into `into`. No command may be in flight for them.
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        match self {
            Self::Pinned { buffer, .. } => {
                let from = buffer.as_slice().get(offset..offset + into.len());
                into.copy_from_slice(from.ok_or_else(past_end)?);
                Ok(())
            }
            Self::OnGpu { memory, .. } => memory.download(offset, into),
        }
    }

    /// Copies `from` to the bytes from `offset` on. No command may be in flight for them.
    pub fn write(&mut self, offset: usize, from: &[u8]) -> Result<()> {
        match self {
            Self::Pinned { buffer, .. } => {
                let into = buffer.as_mut_slice().get_mut(offset..offset + from.len());
                into.ok_or_else(past_end)?.copy_from_slice(from);
                Ok(())
            }
            Self::OnGpu { memory, .. } => memory.upload(offset, from),
        }
    }
}

impl Drop for GpuData {
    fn drop(&mut self) {
        if let Self::OnGpu {
            memory,
            iova,
            device,
        } = self
            && device.unmap_dma(*iova, memory.len()).is_err()
        {
            // The device may still write there: then the memory is leaked.
            std::mem::forget(Arc::clone(memory));
        }
    }
}

fn past_end() -> Error {
    Error::internal("past the end of the data memory")
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
        assert_eq!((tier, why.contains("reaches")), (Tier::GpuMemory, true));
        let (tier, why) = choose(any, Ok(()), Some(Err(no("no peers")))).unwrap();
        assert_eq!((tier, why.contains("no peers")), (Tier::Direct, true));
        let (tier, why) = choose(any, Err(no("follow_pfn")), None).unwrap();
        assert_eq!((tier, why.contains("follow_pfn")), (Tier::Relayed, true));
    }

    #[test]
    fn a_tier_that_was_asked_for_is_that_one_or_an_error() {
        let exactly = TierRequest::Exactly;
        let (tier, _) = choose(exactly(Tier::Direct), Ok(()), None).unwrap();
        assert_eq!(tier, Tier::Direct);
        for tier in [Tier::Direct, Tier::GpuMemory] {
            let error = choose(exactly(tier), Err(no("refused")), None).unwrap_err();
            assert!(error.to_string().contains("refused"), "{error}");
        }
        assert!(choose(exactly(Tier::GpuMemory), Ok(()), Some(Err(no("x")))).is_err());
    }
}
