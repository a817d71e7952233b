//! Makes one PTX file of a crate: a static library with fat LTO, of which only the assembly is kept.

use super::compiler::{Compiler, TARGET};
use chores::process::{Failure, cargo, check, root};
use std::path::{Path, PathBuf};

/// PTX ISA 8.2 is the first with `.mmio`.
const ISA: &str = "+ptx82";
/// Jump threading can duplicate a barrier (rust-lang/rust 137086). Locations would put paths of the
/// machine into the file, and no panic is ever printed on a GPU.
const UNSTABLE: &str = "-Z mir-enable-passes=-JumpThreading -Z location-detail=none";

/// Which GPUs a file is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// One file serves every GPU from sm_80 on: the driver compiles it for the GPU at load time.
    Any,
    /// Instructions that GPUs of compute capability 9.0 alone have.
    Hopper,
}

impl Target {
    fn cpu(self) -> &'static str {
        match self {
            Self::Any => "sm_80",
            Self::Hopper => "sm_90a",
        }
    }

    /// Returns the GPUs for which the assembler must accept the file without spilling registers.
    pub fn gpus(self) -> &'static [&'static str] {
        match self {
            Self::Any => &super::ASSEMBLE_FOR,
            Self::Hopper => &["sm_90a"],
        }
    }
}

/// A crate and its features, built into one file.
pub struct Image {
    /// The file's name without `.ptx`.
    pub name: &'static str,
    pub package: &'static str,
    pub features: &'static str,
    pub target: Target,
    /// True if the file has functions for others to link, rather than kernels.
    pub library: bool,
    /// Prefixes of the instructions that may be `.aligned`.
    pub aligned: &'static [&'static str],
    /// Kernels whose blocks have a known number of threads, which bounds their registers: rustc has no attribute for it.
    pub threads: &'static [(&'static str, u32)],
    /// Kernels of `threads` for which a multiprocessor has to hold two blocks. Without this bound the
    /// assembler may take fewer registers than fit, and spill.
    pub in_twos: &'static [&'static str],
    /// Kernels whose parameter begins with a `CUtensorMap`, and so at a multiple of 64: rustc knows 16 at most.
    pub with_maps: &'static [&'static str],
    /// Path of the committed PTX, if it is committed.
    pub committed: Option<&'static str>,
    /// Path of the committed machine code, if it is committed.
    pub code: Option<&'static str>,
}

impl Image {
    /// Returns the path of the file that the build writes.
    pub fn built(&self) -> PathBuf {
        folder().join(format!("{}.ptx", self.name))
    }

    /// Returns the words that a person would type, without what differs between machines.
    pub fn command(&self) -> String {
        let features = match self.features {
            "" => String::new(),
            features => format!(" --features {features}"),
        };
        format!(
            "cargo rustc -p {} --no-default-features{features} --lib --profile ptx --target {TARGET} \
             --crate-type staticlib -- --emit=asm, with RUSTFLAGS: {}",
            self.package,
            self.rustflags()
        )
    }

    /// Builds it and returns the text, the same on every machine with the same compiler.
    pub fn build(&self, compiler: &Compiler) -> Result<String, Failure> {
        let file = self.built();
        let named = |error: std::io::Error| Failure::new(format!("{}: {error}", file.display()));
        forget_last_build(self.package, &file)?;
        run_rustc(self, compiler, &file)?;
        let text = std::fs::read_to_string(&file).map_err(named)?;
        let text = with_threads(&without_disambiguators(&text), self.threads, self.in_twos)?;
        let text = with_maps(&text, self.with_maps)?;
        std::fs::write(&file, &text).map_err(named)?;
        Ok(text)
    }

    fn rustflags(&self) -> String {
        let cpu = self.target.cpu();
        format!("-C target-cpu={cpu} -C target-feature={ISA} {UNSTABLE}")
    }
}

/// Returns the text with `.maxntid` for each of these kernels, and `.minnctapersm` for those `in_twos`.
fn with_threads(ptx: &str, threads: &[(&str, u32)], in_twos: &[&str]) -> Result<String, Failure> {
    let mut text = ptx.to_string();
    for (name, count) in threads {
        let body = text
            .find(&format!(".entry {name}("))
            .and_then(|head| Some(head + text[head..].find("\n{")?));
        let body = body.ok_or_else(|| Failure::new(format!("no kernel {name} in the PTX")))?;
        let blocks = match in_twos.contains(name) {
            true => "\n.minnctapersm 2",
            false => "",
        };
        text.insert_str(body, &format!("\n.maxntid {count}, 1, 1{blocks}"));
    }
    Ok(text)
}

/// Returns the text with the parameters of these kernels at multiples of 64.
fn with_maps(ptx: &str, names: &[&str]) -> Result<String, Failure> {
    let mut text = ptx.to_string();
    for name in names {
        let parameter = |align: u32| format!(".param .align {align} .b8 {name}_param_0[");
        if !text.contains(&parameter(16)) {
            return Err(Failure::new(format!("no parameter of {name} at 16 bytes")));
        }
        text = text.replace(&parameter(16), &parameter(64));
    }
    Ok(text)
}

fn folder() -> PathBuf {
    root().join("target/ptx")
}

fn run_rustc(image: &Image, compiler: &Compiler, file: &Path) -> Result<(), Failure> {
    let mut rustc = cargo();
    rustc
        .env("RUSTC", &compiler.rustc)
        .env("RUSTC_BOOTSTRAP", "1")
        .env(
            "CARGO_TARGET_NVPTX64_NVIDIA_CUDA_RUSTFLAGS",
            image.rustflags(),
        )
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTC_WRAPPER");
    rustc.args(["rustc", "--quiet", "--lib", "--profile", "ptx"]);
    rustc.args(["--package", image.package, "--target", TARGET]);
    rustc.arg("--no-default-features");
    if !image.features.is_empty() {
        rustc.args(["--features", image.features]);
    }
    rustc.arg("--target-dir").arg(folder().join("build"));
    if compiler.build_std {
        rustc.arg("-Zbuild-std=core");
    }
    rustc
        .args(["--crate-type", "staticlib", "--"])
        .arg(format!("--emit=asm={}", file.display()));
    check(&mut rustc)
}

/// Cargo does not track the file that `--emit` names: with a stale fingerprint it would say
/// "Finished" and leave an old file, or none.
fn forget_last_build(package: &str, file: &Path) -> Result<(), Failure> {
    let io = |error: std::io::Error| Failure::new(format!("{}: {error}", folder().display()));
    std::fs::create_dir_all(folder()).map_err(io)?;
    if file.exists() {
        std::fs::remove_file(file).map_err(io)?;
    }
    let fingerprints = folder().join("build").join(TARGET).join("ptx/.fingerprint");
    let entries = std::fs::read_dir(fingerprints).into_iter().flatten();
    for entry in entries.flatten() {
        let name = entry.file_name();
        if name.to_string_lossy().starts_with(&format!("{package}-")) {
            std::fs::remove_dir_all(entry.path()).map_err(io)?;
        }
    }
    Ok(())
}

/// Removes the crate disambiguators (`Cs<base 62>_`) from mangled names: cargo derives them from paths and from its own
/// version.
fn without_disambiguators(ptx: &str) -> String {
    let mut clean = String::with_capacity(ptx.len());
    for line in ptx.split_inclusive('\n') {
        let mut rest = line;
        while let Some(start) = rest.find("_R") {
            let name = &rest[start..];
            let end = name
                .find(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '$' && c != '.')
                .unwrap_or(name.len());
            clean.push_str(&rest[..start]);
            clean.push_str(&without_hashes(&name[..end]));
            rest = &name[end..];
        }
        clean.push_str(rest);
    }
    clean
}

fn without_hashes(name: &str) -> String {
    let mut clean = String::new();
    let mut rest = name;
    while let Some(start) = rest.find("Cs") {
        let hash = &rest[start + 2..];
        let len = hash
            .find(|c: char| !c.is_ascii_alphanumeric())
            .unwrap_or(hash.len());
        clean.push_str(&rest[..start]);
        clean.push('C');
        // A hash ends in an underscore and is not a word that happens to follow `Cs`.
        rest = match hash[len..].strip_prefix('_') {
            Some(rest) if (8..=12).contains(&len) => rest,
            _ => {
                clean.push('s');
                hash
            }
        };
    }
    clean + rest
}

#[cfg(test)]
mod tests {
    use super::{with_maps, with_threads, without_disambiguators};

    #[test]
    fn parameters_with_maps_lie_at_multiples_of_64() {
        let ptx = |align| format!("(\n\t.param .align {align} .b8 k_param_0[320]\n)\n");
        assert_eq!(with_maps(&ptx(16), &["k"]).unwrap(), ptx(64));
        assert!(with_maps(&ptx(8), &["k"]).is_err());
    }

    #[test]
    fn threads_come_before_the_body_of_their_kernel() {
        let ptx = ".entry a(\n)\n{\n}\n.entry ab(\n\t.param .u64 x\n)   // @ab\n{\n}\n";
        let bounded = with_threads(ptx, &[("ab", 384)], &[]).unwrap();
        assert_eq!(
            bounded,
            ptx.replace("// @ab\n", "// @ab\n.maxntid 384, 1, 1\n")
        );
        let in_twos = with_threads(ptx, &[("ab", 384)], &["ab"]).unwrap();
        assert!(in_twos.contains(".maxntid 384, 1, 1\n.minnctapersm 2"));
        assert!(with_threads(ptx, &[("b", 1)], &[]).is_err());
    }

    #[test]
    fn names_do_not_depend_on_the_machine() {
        let line = "call _RNvNtCsanIojcP8aaR_4core9panicking9panic_fmt; // Cs12345678_\n";
        let clean = "call _RNvNtC4core9panicking9panic_fmt; // Cs12345678_\n";
        assert_eq!(without_disambiguators(line), clean);
        let two = "_RNvXCs12345678901_3foo_NtCsabcdefghij_3bar3Css, _RNvCs_1x";
        assert_eq!(
            without_disambiguators(two),
            "_RNvXC3foo_NtC3bar3Css, _RNvCs_1x"
        );
    }
}
