//! Machine code of the images that the host loads at once: one file for each image, and a list of their contents.

use super::build::Image;
use chores::process::{Failure, output};
use std::path::Path;
use std::process::Command;
use xxhash_rust::xxh3::xxh3_64;

/// GPUs whose machine code is committed. Code for sm_80 also runs on 8.6, 8.7 and 8.9, and so on (CUDA C++ Programming
/// Guide, "Binary Compatibility"). Later GPUs use the PTX.
pub const CODE_FOR: [&str; 4] = ["sm_80", "sm_90", "sm_100", "sm_120"];
/// File that lists the contents of the files of machine code.
pub const LIST: &str = "nvme-gpu-kernel/ptx/code.txt";
/// Level of compression, the strongest: a file is compressed once and read often.
const LEVEL: u8 = 10;

/// The list of machine code, as it was committed or as it is now.
#[derive(Default)]
pub struct CodeList {
    assembler: String,
    /// `IMAGE ptx HASH`, and `IMAGE GPU BYTES HASH`.
    lines: Vec<String>,
}

impl CodeList {
    /// Returns an empty list of this assembler.
    pub fn of(ptxas: &Path) -> Result<Self, Failure> {
        let version = output(Command::new(ptxas).arg("--version"))?;
        let line = version.lines().find(|line| line.contains("release"));
        Ok(Self {
            assembler: line.unwrap_or("an unknown version").trim().to_string(),
            lines: Vec::new(),
        })
    }

    pub fn read(text: &str) -> Self {
        let mut lines = text.lines();
        let head = lines.next().unwrap_or_default();
        Self {
            assembler: head
                .rsplit("ptxas: ")
                .next()
                .unwrap_or_default()
                .to_string(),
            lines: lines.map(str::to_string).collect(),
        }
    }

    pub fn text(&self) -> String {
        let head = "# Machine code: written by `cargo xtask ptx --refresh`, not by hand. ptxas: ";
        let lines = self.lines.iter().map(|line| line.clone() + "\n");
        format!("{head}{}\n{}", self.assembler, lines.collect::<String>())
    }

    /// Adds the PTX that machine code is made from.
    pub fn add_ptx(&mut self, image: &Image, ptx: &str) {
        let hash = xxh3_64(ptx.as_bytes());
        self.lines.push(format!("{} ptx {hash:016x}", image.name));
    }

    /// Adds the machine code of `gpu`.
    pub fn add(&mut self, image: &Image, gpu: &str, code: &[u8]) {
        let (bytes, hash) = (code.len(), xxh3_64(code));
        self.lines
            .push(format!("{} {gpu} {bytes} {hash:016x}", image.name));
    }

    /// Returns what is out of date in `committed`, whose machine code may come from another assembler. It may list more
    /// GPUs.
    pub fn stale<'a>(&'a self, committed: &'a Self) -> impl Iterator<Item = String> + 'a {
        let is_same = self.assembler == committed.assembler;
        let judged = self
            .lines
            .iter()
            .filter(move |line| is_same || line.contains(" ptx "));
        judged
            .filter(|line| !committed.lines.contains(line))
            .map(|line| format!("{LIST} lacks \"{line}\": run `cargo xtask ptx --refresh` and commit the machine code"))
    }
}

/// Returns the file of machine code in the format that `nvme_gpu_kernel::KernelImage` reads.
pub fn file(codes: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut file = b"NVMECODE".to_vec();
    file.extend((codes.len() as u32).to_le_bytes());
    let mut begin = file.len() + codes.len() * 16;
    let packed = |code: &Vec<u8>| miniz_oxide::deflate::compress_to_vec_zlib(code, LEVEL);
    let all: Vec<Vec<u8>> = codes.iter().map(|(_, code)| packed(code)).collect();
    for ((gpu, code), packed) in codes.iter().zip(&all) {
        let capability: u32 = gpu.trim_start_matches("sm_").parse().unwrap_or(0);
        for field in [
            capability,
            begin as u32,
            packed.len() as u32,
            code.len() as u32,
        ] {
            file.extend(field.to_le_bytes());
        }
        begin += packed.len();
    }
    file.extend(all.concat());
    file
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(assembler: &str, lines: &[&str]) -> CodeList {
        CodeList {
            assembler: assembler.to_string(),
            lines: lines.iter().map(|line| line.to_string()).collect(),
        }
    }

    #[test]
    fn a_list_is_read_as_it_was_written() {
        let first = list(
            "release 13.5, V13.5.37",
            &["rows ptx 01", "rows sm_80 4 02"],
        );
        let again = CodeList::read(&first.text());
        assert_eq!(
            (&again.assembler, &again.lines),
            (&first.assembler, &first.lines)
        );
    }

    #[test]
    fn other_ptx_is_stale_and_other_code_only_by_the_same_assembler() {
        let old = list("a", &["rows ptx 01", "rows sm_80 4 02", "rows sm_120 4 05"]);
        let count = |new: CodeList| new.stale(&old).count();
        assert_eq!(count(list("a", &["rows ptx 01", "rows sm_80 4 02"])), 0);
        assert_eq!(count(list("a", &["rows ptx 01", "rows sm_80 4 03"])), 1);
        assert_eq!(count(list("b", &["rows ptx 01", "rows sm_80 4 03"])), 0);
        assert_eq!(count(list("b", &["rows ptx 02", "rows sm_80 4 02"])), 1);
    }

    #[test]
    fn a_file_has_an_entry_for_each_gpu() {
        let file = file(&[("sm_80", vec![1; 100]), ("sm_90", vec![2; 50])]);
        let field = |at: usize| u32::from_le_bytes(*file[at..].first_chunk().unwrap());
        assert_eq!((&file[..8], field(8)), (&b"NVMECODE"[..], 2));
        assert_eq!(
            (field(12), field(24), field(28), field(40)),
            (80, 100, 90, 50)
        );
        let (begin, length) = (field(32) as usize, field(36) as usize);
        let code = miniz_oxide::inflate::decompress_to_vec_zlib(&file[begin..begin + length]);
        assert_eq!((code.unwrap(), begin + length), (vec![2; 50], file.len()));
    }
}
