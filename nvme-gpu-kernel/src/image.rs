//! Kernels as a host loads them: machine code of the GPUs that are known, and PTX for all that come later.
//!
//! Machine code lies in one file for all GPUs, which `cargo xtask ptx --refresh` writes: a [head](CodeHead), an
//! [entry](CodeEntry) for each GPU, and the entries' bytes, each compressed by itself (zlib, RFC 1950).

use core::mem::size_of;

/// First bytes of a file of machine code.
pub const CODE_MAGIC: [u8; 8] = *b"NVMECODE";

/// A set of kernels. A driver compiles PTX for seconds; machine code is loaded in milliseconds.
#[derive(Clone, Copy, Debug)]
pub struct KernelImage {
    /// The PTX, for any GPU from sm_80 on.
    pub ptx: &'static str,
    /// The file of machine code that was assembled from this PTX; empty when there is none.
    pub code: &'static [u8],
}

/// Machine code for one kind of GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeEntry {
    /// Compute capability of the GPU, as in `sm_90`: 10 x major + minor. Its code also runs on later minors of this major.
    pub capability: u32,
    /// Bytes in the file.
    pub compressed: &'static [u8],
    /// Bytes of the machine code, an ELF file.
    pub bytes: usize,
}

/// Length of what precedes the entries: the magic, and the number of entries.
const HEAD_BYTES: usize = CODE_MAGIC.len() + size_of::<u32>();
/// Length of an entry: capability, offset in the file, compressed bytes, bytes; each 32 bits, little endian.
const ENTRY_BYTES: usize = 4 * size_of::<u32>();

impl KernelImage {
    /// Returns the machine code for a GPU of this capability: of its major number, and of the largest minor number that is
    /// not above its own (CUDA C++ Programming Guide, "Binary Compatibility"). None: the PTX is for it.
    pub fn code_for(&self, capability: u32) -> Option<CodeEntry> {
        let fits = |entry: &CodeEntry| {
            entry.capability / 10 == capability / 10 && entry.capability <= capability
        };
        self.entries()
            .filter(fits)
            .max_by_key(|entry| entry.capability)
    }

    /// Returns the machine code of every GPU in the file. A file that is cut has fewer.
    pub fn entries(&self) -> impl Iterator<Item = CodeEntry> {
        let code = self.code;
        let count = match code.strip_prefix(&CODE_MAGIC) {
            Some(_) => word(code, CODE_MAGIC.len()).unwrap_or(0) as usize,
            None => 0,
        };
        (0..count).map_while(move |index| entry(code, index))
    }
}

fn entry(code: &'static [u8], index: usize) -> Option<CodeEntry> {
    let at = index.checked_mul(ENTRY_BYTES)?.checked_add(HEAD_BYTES)?;
    let field = |index: usize| word(code, at + index * size_of::<u32>());
    let (begin, length) = (field(1)? as usize, field(2)? as usize);
    Some(CodeEntry {
        capability: field(0)?,
        compressed: code.get(begin..begin.checked_add(length)?)?,
        bytes: field(3)? as usize,
    })
}

fn word(code: &[u8], at: usize) -> Option<u32> {
    let bytes = code.get(at..)?.first_chunk()?;
    Some(u32::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(code: &'static [u8]) -> KernelImage {
        KernelImage { ptx: "", code }
    }

    /// Returns a file with these capabilities and one byte of each.
    fn file(capabilities: &[u32]) -> &'static [u8] {
        let mut file = CODE_MAGIC.to_vec();
        file.extend((capabilities.len() as u32).to_le_bytes());
        let begin = HEAD_BYTES + capabilities.len() * ENTRY_BYTES;
        for (index, &capability) in capabilities.iter().enumerate() {
            for field in [capability, (begin + index) as u32, 1, 7] {
                file.extend(field.to_le_bytes());
            }
        }
        file.extend(capabilities.iter().map(|&capability| capability as u8));
        file.leak()
    }

    #[test]
    fn a_gpu_gets_code_of_its_major_number_that_is_not_later_than_it() {
        let image = image(file(&[80, 90, 100, 103, 120]));
        let found = |capability| image.code_for(capability).map(|entry| entry.capability);
        let cases = [
            (75, None),
            (80, Some(80)),
            (86, Some(80)),
            (89, Some(80)),
            (90, Some(90)),
            (100, Some(100)),
            (103, Some(103)),
            (110, None),
            (121, Some(120)),
            (130, None),
        ];
        for (capability, wanted) in cases {
            assert_eq!(found(capability), wanted, "sm_{capability}");
        }
        let entry = image.code_for(86).unwrap();
        assert_eq!((entry.compressed, entry.bytes), (&[80][..], 7));
    }

    #[test]
    fn a_file_that_is_cut_anywhere_has_fewer_entries_and_never_another_one() {
        let whole = file(&[80, 90]);
        let entries: Vec<_> = image(whole).entries().collect();
        assert_eq!(entries.len(), 2);
        for length in 0..whole.len() {
            for (index, found) in image(&whole[..length]).entries().enumerate() {
                assert_eq!(found, entries[index]);
            }
        }
        assert_eq!(image(&[]).entries().count(), 0);
        assert_eq!(image(b"NVMECODE\xff\xff\xff\xff").entries().count(), 0);
    }

    #[test]
    fn every_image_of_this_crate_has_code_for_four_kinds_of_gpus() {
        use crate::{HASH, KERNELS, MAPPED, ROWS, SCATTER};
        for image in [&KERNELS, &ROWS, &MAPPED, &SCATTER, &HASH] {
            let found: Vec<_> = image.entries().map(|entry| entry.capability).collect();
            assert_eq!(found, [80, 90, 100, 120]);
        }
    }
}
