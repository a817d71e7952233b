//! Findings about each GPU from the CUDA driver.

use super::finding::{DoctorFinding, FindingSeverity, MACHINE, SubjectFindings};
use crate::sharing::{MemorySharing, sharing_of};
use nvme_cuda::{GpuFacts, HostPinning};
use nvme_driver::error::{Error, Result};

/// Translates the result of [`GpuFacts::all`] into findings; `pinning` returns, for a GPU's number, whether
/// host memory can be registered with it.
pub fn examine(
    found: Result<Vec<GpuFacts>>,
    pinning: impl Fn(u32) -> Result<HostPinning>,
) -> Vec<DoctorFinding> {
    let gpus = match found {
        Ok(gpus) => gpus,
        Err(error) => {
            let mut notes = SubjectFindings::about(MACHINE);
            let remedy = Error::remedy(&error);
            notes.add("CUDA", FindingSeverity::Note, error.to_string(), remedy);
            return notes.all;
        }
    };
    let of_gpu = |gpu: &GpuFacts| {
        let mut notes = SubjectFindings::about(&gpu.address);
        let (major, minor) = gpu.capability;
        notes.ok(
            "CUDA",
            format!(
                "GPU {} ({}), compute capability {major}.{minor}, driver for CUDA {}",
                gpu.index, gpu.name, gpu.cuda
            ),
        );
        sharing(gpu, &mut notes);
        ordering(gpu, &mut notes);
        export(gpu, &mut notes);
        memory(pinning(gpu.index), &mut notes);
        notes.all
    };
    gpus.iter().flat_map(of_gpu).collect()
}

/// Examines whether the GPU shares memory with the processor, and says which tier is the way then.
fn sharing(gpu: &GpuFacts, notes: &mut SubjectFindings) {
    const NAME: &str = "memory of the GPU";
    match sharing_of(gpu.integrated, gpu.host_page_tables) {
        None => {}
        Some(MemorySharing::Integrated) => notes.ok(
            NAME,
            "it is the host's (an integrated GPU): tier 1 is the way, since a drive that writes to memory of the host \
             writes where the GPU reads; GPUDirect and tier 2 would gain nothing",
        ),
        Some(MemorySharing::HostPageTables) => notes.ok(
            NAME,
            "the GPU also reads memory of the host coherently, by the processor's page tables: tier 1 is the way",
        ),
    }
}

/// Examines whether a completion in host memory can become visible before the data that a drive wrote into GPU
/// memory.
fn ordering(gpu: &GpuFacts, notes: &mut SubjectFindings) {
    let flush = match gpu.flush_options {
        0 => "none",
        1 => "by the host",
        2 => "by memory operations of streams",
        _ => "by the host and by memory operations of streams",
    };
    let text = |who: &str| {
        format!(
            "GPU_DIRECT_RDMA_WRITES_ORDERING is {} ({who}), flush {flush}",
            gpu.writes_ordering
        )
    };
    match gpu.writes_ordering {
        200.. => notes.ok(
            "write ordering",
            text("every GPU sees peers' writes in order"),
        ),
        100.. => notes.ok(
            "write ordering",
            text("the GPU that owns the memory sees peers' writes in order"),
        ),
        _ => notes.add(
            "write ordering",
            FindingSeverity::Warning,
            text("no order without a flush"),
            "tier 2 is refused on this GPU; use --tier 1",
        ),
    }
}

/// Examines whether host memory can be registered with the GPU.
fn memory(pinning: Result<HostPinning>, notes: &mut SubjectFindings) {
    const NAME: &str = "memory of the host";
    match pinning {
        Ok(HostPinning::Registers) => notes.ok(NAME, "the driver registers it"),
        Ok(HostPinning::Allocates(why)) => notes.add(
            NAME,
            FindingSeverity::Warning,
            format!("the driver registers none ({why}), and allocates some"),
            "the GPU reaches no queues: stores have a host thread move its rows, and --gpu is refused",
        ),
        Ok(HostPinning::Refuses(why)) => notes.add(
            NAME,
            FindingSeverity::Warning,
            format!("the driver registers none and allocates none: {why}"),
            "use no GPU: leave --gpu and `gpu` out",
        ),
        Err(error) => {
            let remedy = error.remedy().to_owned();
            notes.add(NAME, FindingSeverity::Note, error.to_string(), remedy);
        }
    }
}

fn export(gpu: &GpuFacts, notes: &mut SubjectFindings) {
    let rdma = match gpu.rdma {
        true => "is",
        false => "is not",
    };
    match gpu.dma_buf {
        true => notes.ok(
            "dma-buf of the GPU",
            format!("its memory can be exported; GPUDirect RDMA {rdma} supported"),
        ),
        false => notes.add(
            "dma-buf of the GPU",
            FindingSeverity::Warning,
            format!("CUDA exports none of its memory; GPUDirect RDMA {rdma} supported"),
            "for tier 2: the open kernel modules, on a GPU other than a GeForce",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(writes_ordering: i32, dma_buf: bool) -> GpuFacts {
        GpuFacts {
            index: 0,
            name: "H200".to_owned(),
            address: "0000:03:00.0".to_owned(),
            capability: (9, 0),
            cuda: "13.0".to_owned(),
            writes_ordering,
            flush_options: 1,
            rdma: dma_buf,
            dma_buf,
            integrated: false,
            host_page_tables: false,
        }
    }

    #[test]
    fn each_gpu_has_its_order_and_its_export() {
        for (ordering, dma_buf, status, text) in [
            (100, true, FindingSeverity::Ok, "is 100 (the GPU that owns"),
            (200, true, FindingSeverity::Ok, "is 200 (every GPU"),
            (0, false, FindingSeverity::Warning, "is 0 (no order"),
        ] {
            let registers = |_| Ok(HostPinning::Registers);
            let found = examine(Ok(vec![gpu(ordering, dma_buf)]), registers);
            assert_eq!((found.len(), found[3].status), (4, FindingSeverity::Ok));
            assert!(found[0].text.contains("compute capability 9.0"));
            assert_eq!((found[1].status, found[2].status), (status, status));
            assert!(found[1].text.contains(text), "{}", found[1].text);
            assert!(found[1].text.contains("flush by the host"));
            assert!(found.iter().all(|one| one.subject == "0000:03:00.0"));
        }
        let none = examine(Err(Error::environment("no driver", "install one")), |_| {
            panic!("there is no GPU")
        });
        assert_eq!(
            (none[0].status, none[0].text.as_str()),
            (FindingSeverity::Note, "no driver")
        );
    }

    #[test]
    fn a_gpu_that_shares_memory_has_tier_1_as_its_way() {
        for (integrated, host_page_tables, text) in [
            (
                true,
                true,
                "it is the host's (an integrated GPU): tier 1 is the way",
            ),
            (
                true,
                false,
                "it is the host's (an integrated GPU): tier 1 is the way",
            ),
            (
                false,
                true,
                "by the processor's page tables: tier 1 is the way",
            ),
        ] {
            let gpu = GpuFacts {
                integrated,
                host_page_tables,
                ..gpu(100, false)
            };
            let found = examine(Ok(vec![gpu]), |_| Ok(HostPinning::Registers));
            let mut all = found.iter();
            let memory = all.find(|one| one.check == "memory of the GPU").unwrap();
            assert_eq!(memory.status, FindingSeverity::Ok);
            assert!(memory.text.contains(text), "{}", memory.text);
        }
    }

    #[test]
    fn a_driver_that_registers_no_memory_is_named() {
        let why = || "cuMemHostRegister: refused (NOT_SUPPORTED)".to_owned();
        for (pinning, text) in [
            (HostPinning::Allocates(why()), "and allocates some"),
            (HostPinning::Refuses(why()), "allocates none"),
        ] {
            let found = examine(Ok(vec![gpu(100, true)]), |_| Ok(pinning.clone()));
            let memory = &found[3];
            assert_eq!(memory.status, FindingSeverity::Warning);
            assert!(memory.text.contains("NOT_SUPPORTED"), "{}", memory.text);
            assert!(memory.text.contains(text), "{}", memory.text);
        }
        let busy = |_| Err(Error::environment("another process uses it", "wait"));
        let found = examine(Ok(vec![gpu(100, true)]), busy);
        assert_eq!(found[3].status, FindingSeverity::Note);
    }
}
