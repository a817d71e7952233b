//! Addresses of callers that kernels and copies of a GPU use: the kind of their memory, and whether the GPU may access
//! it as the call requires.
//!
//! The driver answers all questions about an address in one call, 0.2 us on an H100. The call is allowed while a stream
//! is captured; launches of a graph make none.
// UNSAFETY: asks the driver about addresses.
#![allow(unsafe_code)]

use super::driver::{Gpu, check};
use super::stream::is_capturing;
use cudarc::driver::sys::{self, CUmemorytype, CUpointer_attribute as Attribute};
use nvme_driver::error::{Error, Result};

/// Location of memory, as the driver knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryLocation {
    /// The address is in host memory that GPUs do not reach.
    Host,
    /// The address is in host memory that was allocated by the driver, or registered with it.
    Pinned,
    /// The address is in memory of this GPU, or in managed memory.
    Gpu,
    /// The address is in memory of another GPU.
    OtherGpu,
}

/// Access of a kernel to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryUse {
    /// The GPU reads the memory.
    Reads,
    /// The GPU reads the memory, and may write its result over it: the same address and length.
    ReadsInPlace,
    /// The GPU writes the memory, and may read it.
    Writes,
}

/// Memory of a caller that is an argument of a launch.
#[derive(Clone, Copy, Debug)]
pub struct KernelArgument<'a> {
    /// Name of the argument in the call.
    pub name: &'a str,
    /// The first byte.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Required alignment of the address.
    pub unit: u64,
    /// Access of the kernel.
    pub usage: MemoryUse,
}

impl<'a> KernelArgument<'a> {
    /// Describes `count` elements of `unit` bytes that a kernel reads.
    pub fn read(name: &'a str, address: u64, count: u64, unit: u64) -> Self {
        Self {
            name,
            address,
            // A product that overflows is replaced by the maximum, which no allocation has, so that it is refused.
            bytes: count.saturating_mul(unit),
            unit,
            usage: MemoryUse::Reads,
        }
    }

    /// Requires an address that is a multiple of `bytes`, more than an element has.
    pub fn aligned_to(self, bytes: u64) -> Self {
        Self {
            unit: bytes,
            ..self
        }
    }

    /// Describes `count` elements of `unit` bytes that a kernel reads, and that may be the memory of its result.
    pub fn read_in_place(name: &'a str, address: u64, count: u64, unit: u64) -> Self {
        Self {
            usage: MemoryUse::ReadsInPlace,
            ..Self::read(name, address, count, unit)
        }
    }

    /// Describes `count` elements of `unit` bytes that a kernel writes.
    pub fn written(name: &'a str, address: u64, count: u64, unit: u64) -> Self {
        Self {
            usage: MemoryUse::Writes,
            ..Self::read(name, address, count, unit)
        }
    }

    /// Returns the argument for [`check_apart`](Self::check_apart): one whose elements have gaps is left out, since other
    /// arguments may lie in these.
    pub fn if_dense(self, is_dense: bool) -> Self {
        match is_dense {
            true => self,
            false => Self { bytes: 0, ..self },
        }
    }

    /// Checks that memory that a kernel writes is no memory of another argument of the call: threads run in any order, so
    /// that some would read what others have written.
    ///
    /// # Errors
    /// [`Error::Usage`] with the names of two arguments that share memory.
    pub fn check_apart(all: &[Self]) -> Result<()> {
        for (at, one) in all.iter().enumerate() {
            for other in &all[at + 1..] {
                if one.excludes(other) {
                    return Err(Error::usage(
                        format!(
                            "{} and {} share memory, which the GPU writes",
                            one.name, other.name
                        ),
                        "use separate memory for each",
                    ));
                }
            }
        }
        Ok(())
    }

    /// True if a kernel cannot have both arguments.
    fn excludes(&self, other: &Self) -> bool {
        use MemoryUse::{ReadsInPlace, Writes};
        let end = |one: &Self| one.address.saturating_add(one.bytes);
        let is_shared = self.bytes > 0
            && other.bytes > 0
            && self.address < end(other)
            && other.address < end(self);
        let is_same = (self.address, self.bytes) == (other.address, other.bytes);
        is_shared
            && match (self.usage, other.usage) {
                (ReadsInPlace, Writes) | (Writes, ReadsInPlace) => !is_same,
                (Writes, _) | (_, Writes) => true,
                _ => false,
            }
    }
}

/// Attributes of an address that the driver reports.
#[derive(Clone, Copy)]
struct PointerAttributes {
    place: MemoryLocation,
    /// Number of the GPU that owns the memory.
    ordinal: i32,
    /// Address by which kernels of this GPU reach the memory; 0 if they cannot.
    mapped: u64,
    may_read: bool,
    may_write: bool,
    /// The first byte of the allocation, or of the registration, and the first one after it.
    start: u64,
    end: u64,
}

/// Attributes that are queried, in the order of the answers.
const ASKED: [Attribute; 7] = [
    Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
    Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
    Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    Attribute::CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
    Attribute::CU_POINTER_ATTRIBUTE_ACCESS_FLAGS,
    Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
    Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
];
/// Limit of the number of adjacent allocations that one argument may span.
const MOST_PIECES: u32 = 1 << 16;
/// Allocations that are remembered for the arguments of a call.
const MOST_KNOWN: usize = 64;

impl Gpu {
    /// Returns the location of the byte at `address`. Any address may be passed; nothing is read there.
    ///
    /// # Errors
    /// [`Error::Environment`] with the driver's answer.
    pub fn place_of(&self, address: u64) -> Result<MemoryLocation> {
        let _guest = self.enter()?;
        Ok(self.know(address)?.place)
    }

    /// Checks memory that a caller passes to a kernel, or to a copy in a stream: each byte lies in memory of this GPU,
    /// in managed memory, or in memory of the host that is registered with CUDA, and may be used as `argument` says.
    /// Returns the address by which kernels of this GPU reach it.
    ///
    /// An argument of no bytes is not checked. While `stream`, a `CUstream`, is being captured, memory that the graph
    /// allocates itself is accepted: the driver does not know it, and it is not memory of the host.
    ///
    /// # Errors
    /// [`Error::Usage`] with the argument's name, the kind of memory that it has and the kind that it needs.
    pub fn judge(&self, stream: u64, argument: &KernelArgument<'_>) -> Result<u64> {
        let [address] = self.judge_all(stream, [*argument])?;
        Ok(address)
    }

    /// Checks all arguments of a call as [`judge`](Self::judge) does.
    ///
    /// # Errors
    /// The error of the first argument that is refused.
    pub fn judge_all<const N: usize>(
        &self,
        stream: u64,
        all: [KernelArgument<'_>; N],
    ) -> Result<[u64; N]> {
        let _guest = self.enter()?;
        let mut mapped = [0; N];
        for (to, argument) in mapped.iter_mut().zip(&all) {
            *to = self.judge_inside(stream, argument)?.0;
        }
        Ok(mapped)
    }

    /// Does the same as [`judge`](Self::judge), for any number of arguments that have the same address on the host and
    /// on the GPU.
    ///
    /// # Errors
    /// The error of the first argument that is refused.
    pub fn judge_list<'a>(
        &self,
        stream: u64,
        all: impl IntoIterator<Item = KernelArgument<'a>>,
    ) -> Result<()> {
        let _guest = self.enter()?;
        let mut known: Vec<PointerAttributes> = Vec::new();
        for argument in all {
            let end = self.check_shape(&argument)?;
            // Parts of few allocations, as the blocks of a cache: the driver has said what these are.
            let has = |one: &&PointerAttributes| {
                argument.bytes > 0 && one.start <= argument.address && end <= one.end
            };
            if let Some(known) = known.iter().find(has) {
                self.check_reached(&argument, known)?;
                continue;
            }
            let (mapped, found) = self.judge_inside(stream, &argument)?;
            let of_gpu = found.filter(|found| found.place == MemoryLocation::Gpu);
            if known.len() == MOST_KNOWN {
                known.clear();
            }
            known.extend(of_gpu);
            if mapped != argument.address {
                return Err(refused(
                    &argument,
                    format!("has another address on GPU {}", self.index()),
                    "use memory of the GPU",
                ));
            }
        }
        Ok(())
    }

    /// Checks the arguments of a call as [`judge_list`](Self::judge_list) does, and that those that the kernel writes lie
    /// apart from all others.
    ///
    /// # Errors
    /// As [`judge_list`](Self::judge_list) and [`KernelArgument::check_apart`].
    pub fn judge_apart(&self, stream: u64, all: &[KernelArgument<'_>]) -> Result<()> {
        self.judge_list(stream, all.iter().copied())?;
        KernelArgument::check_apart(all)
    }

    /// Performs [`judge`](Self::judge) while this GPU's context is current.
    /// Also returns what the driver says of the first byte, unless there is none, or it is of a captured graph.
    fn judge_inside(
        &self,
        stream: u64,
        argument: &KernelArgument<'_>,
    ) -> Result<(u64, Option<PointerAttributes>)> {
        let KernelArgument { address, bytes, .. } = *argument;
        let end = self.check_shape(argument)?;
        if bytes == 0 {
            return Ok((address, None));
        }
        let first = self.know(address)?;
        if first.place == MemoryLocation::Host && !is_host_memory(address) && is_capturing(stream)?
        {
            return Ok((address, None));
        }
        self.check_reached(argument, &first)?;
        let mut last = first;
        let mut pieces = 1;
        // Memory that was registered in pieces lies in several adjacent ranges.
        while last.end < end {
            let at = last.end;
            let next = self.know(at)?;
            let goes_on = next.mapped == first.mapped.wrapping_add(at - address);
            if pieces == MOST_PIECES || next.end <= at || next.place != first.place || !goes_on {
                return Err(refused(
                    argument,
                    format!("has {} bytes of the {bytes} that are used", at - address),
                    "check length and shape, or give memory that is as long",
                ));
            }
            self.check_reached(argument, &next)?;
            last = next;
            pieces += 1;
        }
        Ok((first.mapped, Some(first)))
    }

    /// Checks an argument as far as that is possible without the driver, and returns its end.
    fn check_shape(&self, argument: &KernelArgument<'_>) -> Result<u64> {
        let KernelArgument {
            address,
            bytes,
            unit,
            ..
        } = *argument;
        if bytes > 0 && address == 0 {
            return Err(refused(
                argument,
                "is NULL",
                format!("give memory of GPU {}", self.index()),
            ));
        }
        if bytes > 0 && !address.is_multiple_of(unit.max(1)) {
            return Err(refused(
                argument,
                format!("does not begin at a multiple of {unit}"),
                "give memory as an allocator gives it, and whole elements from there",
            ));
        }
        address.checked_add(bytes).ok_or_else(|| {
            let cause = format!("cannot have {bytes} bytes");
            refused(argument, cause, "check length and shape")
        })
    }

    /// Checks that kernels of this GPU may use a byte of `argument` with these attributes.
    fn check_reached(
        &self,
        argument: &KernelArgument<'_>,
        known: &PointerAttributes,
    ) -> Result<()> {
        let index = self.index();
        let remedy = format!("use memory of GPU {index}");
        match known.place {
            MemoryLocation::Host => {
                let cause = "lies on the host and is not registered with CUDA";
                let remedy = format!("{remedy}, or pinned host memory");
                return Err(refused(argument, cause, remedy));
            }
            MemoryLocation::OtherGpu => {
                let cause = format!(
                    "lies on GPU {}, and GPU {index} would use it",
                    known.ordinal
                );
                return Err(refused(argument, cause, remedy));
            }
            MemoryLocation::Pinned | MemoryLocation::Gpu => {}
        }
        if known.mapped == 0 || !known.may_read {
            let cause = format!("cannot be reached by GPU {index}");
            return Err(refused(argument, cause, remedy));
        }
        if argument.usage == MemoryUse::Writes && !known.may_write {
            let cause = "is read-only for the GPU, which would write it";
            return Err(refused(argument, cause, "use memory that may be written"));
        }
        Ok(())
    }

    /// Asks the driver, in this GPU's context. Nothing is read at the address.
    fn know(&self, address: u64) -> Result<PointerAttributes> {
        let mut answers = [0u64; ASKED.len()];
        let mut places = answers.each_mut().map(|one| std::ptr::from_mut(one).cast());
        let mut asked = ASKED;
        // SAFETY: there are as many places as attributes, each with room for the widest, 64 bits.
        check("cuPointerGetAttributes", unsafe {
            sys::cuPointerGetAttributes(
                ASKED.len() as u32,
                asked.as_mut_ptr(),
                places.as_mut_ptr(),
                address,
            )
        })?;
        let [kind, is_managed, ordinal, mapped, access, start, bytes] = answers;
        let ordinal = ordinal as i32;
        let place = if kind as u32 == 0 {
            MemoryLocation::Host
        } else if kind as u32 != CUmemorytype::CU_MEMORYTYPE_DEVICE as u32 {
            MemoryLocation::Pinned
        } else if is_managed as u8 != 0 || ordinal == self.index() as i32 {
            MemoryLocation::Gpu
        } else {
            MemoryLocation::OtherGpu
        };
        Ok(PointerAttributes {
            place,
            ordinal,
            mapped,
            may_read: access & 1 != 0,
            may_write: access & 2 != 0,
            start,
            end: start.saturating_add(bytes),
        })
    }
}

/// True if this process can read the byte at `address`; an address that it cannot read raises no fault.
pub fn is_host_memory(address: u64) -> bool {
    let mut byte = 0u8;
    let to = libc::iovec {
        iov_base: (&raw mut byte).cast(),
        iov_len: 1,
    };
    let from = libc::iovec {
        iov_base: std::ptr::with_exposed_provenance_mut(address as usize),
        iov_len: 1,
    };
    // SAFETY: the kernel reads at the second address, and answers EFAULT where there is nothing to read.
    let read = unsafe { libc::process_vm_readv(libc::getpid(), &to, 1, &from, 1, 0) };
    // If the system forbids the call (a container's seccomp filter), the address counts as readable, as the caller
    // claims: only EFAULT proves that nothing is mapped there.
    read >= 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT)
}

fn refused(
    argument: &KernelArgument<'_>,
    cause: impl std::fmt::Display,
    remedy: impl Into<String>,
) -> Error {
    let (name, address) = (argument.name, argument.address);
    let memory = format!("the memory of {name} at {address:#x}");
    Error::usage(format!("{memory} {cause}"), remedy)
}

#[cfg(test)]
mod tests {
    use super::KernelArgument as Memory;

    fn apart(all: &[Memory<'_>]) -> bool {
        Memory::check_apart(all).is_ok()
    }

    #[test]
    fn what_a_kernel_writes_lies_apart_from_all_else() {
        let (x, y) = (
            Memory::read("x", 0x1000, 8, 4),
            Memory::written("y", 0x1020, 8, 4),
        );
        assert!(apart(&[x, y]) && apart(&[y, x]) && apart(&[x, x]));
        for shared in [
            Memory::read("z", 0x103f, 1, 1),
            Memory::written("z", 0, 0x1021, 1),
        ] {
            let error = Memory::check_apart(&[x, y, shared]).unwrap_err();
            assert!(error.to_string().contains("and z share memory"), "{error}");
        }
        // No byte is shared with an argument without bytes, also inside of another.
        assert!(apart(&[y, Memory::written("z", 0x1030, 0, 4)]));
        assert!(apart(&[y, Memory::read("z", 0x1030, 1, 4).if_dense(false)]));
        assert!(!apart(&[y, Memory::read("z", 0x1030, u64::MAX, 4)]));
    }

    #[test]
    fn a_result_may_be_all_of_an_input_in_place() {
        let x = Memory::read_in_place("x", 0x1000, 8, 4);
        assert!(apart(&[x, Memory::written("y", 0x1000, 8, 4)]));
        assert!(!apart(&[x, Memory::written("y", 0x1004, 8, 4)]));
        assert!(!apart(&[x, Memory::written("y", 0x1000, 7, 4)]));
        assert!(!apart(&[Memory::written("y", 0x1000, 8, 4); 2]));
    }
}
