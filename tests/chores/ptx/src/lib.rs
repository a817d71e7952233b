//! The GPU kernels: rustc's NVPTX back end, then checks on the PTX, then NVIDIA's assembler.
//!
//! Here belong the build, the rules for its output and the tables of `nvme-gpu-kernel/ptx`. What a kernel
//! computes is tested on the host and by `gpu-test`.
//!
//! The back end is only reachable through unstable switches, so the one command that builds for the GPU runs with
//! `RUSTC_BOOTSTRAP=1` on whichever compiler has a core library for it, or its sources.

mod assemble;
mod build;
mod code;
mod committed;
mod compiler;
mod fences;
mod flow;
pub mod nvcc;
mod pins;
mod text;

use build::{Image, Target};
use chores::process::{Failure, root};
use chores::tools;
use code::CodeList;
use committed::Verdict;
use compiler::Compiler;
use pins::OnGpu;
use std::path::{Path, PathBuf};

/// GPUs for which the assembler must accept a file without spilling registers, if the file serves all GPUs.
const ASSEMBLE_FOR: [&str; 3] = ["sm_80", "sm_90", "sm_100"];

/// Values that the images share.
const PLAIN: Image = Image {
    name: "",
    package: "nvme-compute-kernel",
    features: "",
    target: Target::Any,
    library: false,
    aligned: &[],
    in_twos: &[],
    threads: &[],
    with_maps: &[],
    committed: None,
    code: None,
};
/// The kernels that the host embeds.
const KERNELS: Image = Image {
    name: "nvme_gpu_kernel",
    package: "nvme-gpu-kernel",
    features: "kernels",
    committed: Some("nvme-gpu-kernel/ptx/nvme_gpu_kernel.ptx"),
    code: Some("nvme-gpu-kernel/ptx/nvme_gpu_kernel.code"),
    ..PLAIN
};
/// The kernels that gather rows, which the host embeds beside the others.
const ROWS: Image = Image {
    name: "nvme_gpu_rows",
    package: "nvme-gpu-kernel",
    features: "rows",
    committed: Some("nvme-gpu-kernel/ptx/nvme_gpu_rows.ptx"),
    code: Some("nvme-gpu-kernel/ptx/nvme_gpu_rows.code"),
    ..PLAIN
};
/// The kernels that gather rows of tables in several ranges.
const MAPPED: Image = Image {
    name: "nvme_gpu_mapped",
    package: "nvme-gpu-kernel",
    features: "mapped",
    committed: Some("nvme-gpu-kernel/ptx/nvme_gpu_mapped.ptx"),
    code: Some("nvme-gpu-kernel/ptx/nvme_gpu_mapped.code"),
    ..PLAIN
};
/// The kernel that writes rows. In one image with the gathers it would make them need more registers.
const SCATTER: Image = Image {
    name: "nvme_gpu_scatter",
    package: "nvme-gpu-kernel",
    features: "scatter",
    committed: Some("nvme-gpu-kernel/ptx/nvme_gpu_scatter.ptx"),
    code: Some("nvme-gpu-kernel/ptx/nvme_gpu_scatter.code"),
    ..PLAIN
};
/// The kernel that hashes chunks of memory.
const HASH: Image = Image {
    name: "nvme_gpu_hash",
    package: "nvme-gpu-kernel",
    features: "hash",
    committed: Some("nvme-gpu-kernel/ptx/nvme_gpu_hash.ptx"),
    code: Some("nvme-gpu-kernel/ptx/nvme_gpu_hash.code"),
    ..PLAIN
};
/// The kernels that compute with weights.
const COMPUTE: Image = Image {
    name: "compute",
    features: "steps",
    aligned: &["mma.sync.aligned."],
    // A bound of 128 registers: blocks of 256 threads, two on a multiprocessor.
    threads: &[("nvme_gemv_wide", 512), ("nvme_gemv_quantised", 256)],
    in_twos: &["nvme_gemv_quantised"],
    committed: Some("nvme-gpu-kernel/compute/ptx/compute.ptx"),
    ..PLAIN
};
/// The kernels that read the weights that they multiply.
const STREAMED: Image = Image {
    name: "streamed",
    features: "streamed",
    committed: Some("nvme-gpu-kernel/compute/ptx/streamed.ptx"),
    ..PLAIN
};
/// The kernels that attend to keys and values that they read.
const PAGED: Image = Image {
    name: "paged",
    features: "paged",
    committed: Some("nvme-gpu-kernel/compute/ptx/paged.ptx"),
    ..PLAIN
};
/// The kernels that choose which pages to attend to.
const CHOOSE: Image = Image {
    name: "choose",
    features: "choose",
    committed: Some("nvme-gpu-kernel/compute/ptx/choose.ptx"),
    ..PLAIN
};
/// The kernel that searches a graph on a drive.
const SEARCH: Image = Image {
    name: "search",
    features: "search",
    committed: Some("nvme-gpu-kernel/compute/ptx/search.ptx"),
    code: Some("nvme-gpu-kernel/compute/ptx/search.code"),
    ..PLAIN
};
/// The kernels that hash n-grams of tokens.
const NGRAMS: Image = Image {
    name: "ngrams",
    features: "ngrams",
    committed: Some("nvme-gpu-kernel/compute/ptx/ngrams.ptx"),
    code: Some("nvme-gpu-kernel/compute/ptx/ngrams.code"),
    ..PLAIN
};
/// The kernels that choose, cache and compute experts.
const EXPERTS: Image = Image {
    name: "experts",
    features: "experts",
    aligned: &["mma.sync.aligned."],
    threads: &[
        ("nvme_moe_product_wide", 512),
        ("nvme_moe_product_quantised", 256),
        ("nvme_moe_product_batched", 256),
    ],
    in_twos: &["nvme_moe_product_quantised", "nvme_moe_product_batched"],
    committed: Some("nvme-gpu-kernel/compute/ptx/experts.ptx"),
    ..PLAIN
};
/// The kernels that multiply by a matrix that streams from a drive.
const GEMM: Image = Image {
    name: "gemm",
    features: "gemm",
    aligned: &["mma.sync.aligned.", "ldmatrix.sync.aligned."],
    threads: &[("nvme_gemm_streamed", 256), ("nvme_gemm", 256)],
    committed: Some("nvme-gpu-kernel/compute/ptx/gemm.ptx"),
    ..PLAIN
};
/// Products of matrices, rung by rung.
const MATMUL: Image = Image {
    name: "matmul",
    features: "matmul",
    aligned: &["mma.sync.aligned.", "ldmatrix.sync.aligned."],
    threads: &[
        ("nvme_matmul_naive", 256),
        ("nvme_matmul_tiled", 1024),
        ("nvme_matmul_vectorized", 256),
        ("nvme_matmul_coarsened", 256),
        ("nvme_matmul_mma", 128),
    ],
    committed: Some("nvme-gpu-kernel/compute/ptx/matmul.ptx"),
    ..PLAIN
};
/// The one for `wgmma`.
const MATMUL_SM90A: Image = Image {
    name: "matmul_sm90a",
    features: "matmul-sm90a",
    target: Target::Hopper,
    aligned: &["wgmma.", "setmaxnreg."],
    threads: &[("nvme_matmul_wgmma", 384)],
    with_maps: &["nvme_matmul_wgmma"],
    committed: Some("nvme-gpu-kernel/compute/ptx/matmul_sm90a.ptx"),
    ..PLAIN
};
/// The ladder of attention.
const ATTENTION: Image = Image {
    name: "attention",
    features: "attention",
    aligned: &["mma.sync.aligned.", "ldmatrix.sync.aligned."],
    threads: &[
        ("nvme_attention_flash2_64_bf16", 128),
        ("nvme_attention_flash2_64_f16", 128),
        ("nvme_attention_flash2_128_bf16", 128),
        ("nvme_attention_flash2_128_f16", 128),
        ("nvme_multi_query_attention_64_bf16", 128),
        ("nvme_multi_query_attention_64_f16", 128),
        ("nvme_multi_query_attention_128_bf16", 128),
        ("nvme_multi_query_attention_128_f16", 128),
    ],
    committed: Some("nvme-gpu-kernel/compute/ptx/attention.ptx"),
    ..PLAIN
};
/// The ladder of linear layers.
const LINEAR: Image = Image {
    name: "linear",
    features: "linear",
    aligned: &["mma.sync.aligned.", "ldmatrix.sync.aligned."],
    threads: &[
        ("nvme_linear_forward_fused", 256),
        ("nvme_linear_forward_persistent", 256),
        ("nvme_linear_forward_mixed_bf16", 128),
        ("nvme_linear_forward_mixed_f16", 128),
        ("nvme_linear_forward_few", 128),
        ("nvme_linear_forward_few_bf16", 128),
        ("nvme_linear_forward_few_f16", 128),
        ("nvme_linear_backward_inputs", 256),
        ("nvme_linear_backward_inputs_few", 128),
        ("nvme_linear_backward_weights", 256),
    ],
    committed: Some("nvme-gpu-kernel/compute/ptx/linear.ptx"),
    ..PLAIN
};
/// The functions that CUDA C++ links.
const LIBRARY: Image = Image {
    name: "nvme_gpu_device",
    package: "nvme-gpu-kernel",
    features: "device-library",
    library: true,
    committed: Some("nvme-gpu-kernel/ptx/nvme_gpu_device.ptx"),
    ..PLAIN
};
/// A kernel outside this crate that links the core.
const EXAMPLE: Image = Image {
    name: "histogram",
    package: "gpu-histogram",
    committed: Some("nvme-gpu-kernel/examples/gpu-histogram/histogram.ptx"),
    ..PLAIN
};
/// The litmus tests' kernel.
const LITMUS: Image = Image {
    name: "litmus",
    package: "gpu-litmus",
    committed: Some("tests/gpu/litmus/litmus.ptx"),
    ..PLAIN
};
/// The controller that is a kernel, for tests.
const PEER: Image = Image {
    name: "peer",
    package: "gpu-peer",
    committed: Some("tests/gpu/peer/peer.ptx"),
    ..PLAIN
};
/// All images, in the order of the table of kernels.
const IMAGES: [Image; 21] = [
    KERNELS,
    ROWS,
    MAPPED,
    SCATTER,
    HASH,
    COMPUTE,
    STREAMED,
    GEMM,
    PAGED,
    CHOOSE,
    SEARCH,
    NGRAMS,
    EXPERTS,
    MATMUL,
    MATMUL_SM90A,
    ATTENTION,
    LINEAR,
    EXAMPLE,
    LITMUS,
    PEER,
    LIBRARY,
];
/// One function for each operation of the core that touches shared memory.
const PROBES: Image = Image {
    name: "probes",
    package: "nvme-gpu-kernel",
    features: "probes",
    library: true,
    ..PLAIN
};
const DOCUMENT: &str = "nvme-gpu-kernel/ptx/tables.md";
/// Fences and scopes of every function but the litmus tests', some of which are too weak on purpose.
const FENCES: &str = "nvme-gpu-kernel/ptx/fences.txt";
/// Sources that are compiled for the GPU.
const DEVICE_SOURCES: [&str; 7] = [
    "nvme-core/spec/src",
    "nvme-core/src",
    "nvme-gpu-kernel/src",
    "nvme-gpu-kernel/compute/src",
    "nvme-gpu-kernel/examples/gpu-histogram/src",
    "tests/gpu/litmus/src",
    "tests/gpu/peer/src",
];

/// `cargo xtask ptx [--refresh [--accept-fences]]`.
pub fn command(words: &[&str]) -> Result<(), Failure> {
    match words {
        [] => run(false),
        ["--refresh"] => build_and_check(true, false),
        ["--refresh", "--accept-fences"] => build_and_check(true, true),
        _ => Err(Failure::new(format!(
            "ptx knows --refresh and --refresh --accept-fences, not {}",
            words.join(" ")
        ))),
    }
}

/// Builds the PTX and checks it; with `refresh`, writes the committed files.
pub fn run(refresh: bool) -> Result<(), Failure> {
    build_and_check(refresh, false)
}

/// Returns the images whose fences are listed: all but the litmus tests, some of which lack one on purpose.
fn fenced() -> impl Iterator<Item = &'static Image> {
    IMAGES.iter().filter(|image| image.name != LITMUS.name)
}

/// The fences of `images` against the committed table, before anything is written. `accept` writes the table;
/// what breaks a rule is never accepted.
fn check_fences(images: &[(&Image, String)], refresh: bool, accept: bool) -> Result<(), Failure> {
    let mut table = fences::Fences::default();
    let mut faults = Vec::new();
    for image in fenced() {
        let built = images.iter().find(|(built, _)| built.name == image.name);
        let (_, ptx) = built.expect("every image was built");
        let named = |fault| format!("{}.ptx: {fault}", image.name);
        faults.extend(table.add(ptx).into_iter().map(named));
    }
    let path = root().join(FENCES);
    if accept && faults.is_empty() {
        return write(&path, &table.text());
    }
    let differences = table.differences(&fences::Fences::read(&read(&path)?));
    if faults.is_empty() && differences.is_empty() {
        println!("{FENCES}: every fence and scope is there");
        // Only the number of places may differ.
        return if refresh {
            write(&path, &table.text())
        } else {
            Ok(())
        };
    }
    faults.extend(differences);
    Err(Failure::new(format!(
        "fences of the PTX:\n{}\nnothing was written. If each change above is meant, review it in the PTX and run \
         `cargo xtask ptx --refresh --accept-fences`",
        faults.join("\n")
    )))
}

fn build_and_check(refresh: bool, accept_fences: bool) -> Result<(), Failure> {
    let mut faults = device_sources()?;
    let compiler = compiler::compiler()?;
    let ptxas = tools::ptxas()?;
    let document = read(&root().join(DOCUMENT))?;

    let documented = section(&document, "kernels")?;
    let (mut kernels, mut table, mut same) = (String::new(), pins::Table::new(&ASSEMBLE_FOR), true);
    let mut codes = CodeList::of(&ptxas)?;
    let mut images = Vec::new();
    for image in &IMAGES {
        images.push((image, image.build(&compiler)?));
    }
    check_fences(&images, refresh, accept_fences)?;
    for (image, ptx) in images {
        let assembled = checked(image, &ptx, &ptxas, &mut faults)?;
        with_code(image, &ptx, &ptxas, refresh, &mut codes)?;
        same &= with_committed(image, &compiler, &ptx, refresh, &mut faults)? == Verdict::Same;
        table.add(&ptx, &assembled);
        if !refresh {
            faults.extend(pins::growth(&assembled, documented));
        }
        kernels += &ptx;
    }
    let list = root().join(code::LIST);
    if refresh {
        write(&list, &codes.text())?;
    } else if same {
        faults.extend(codes.stale(&CodeList::read(&read(&list)?)));
    }
    let table = table.text();
    if refresh {
        let fresh = pins::with_section(&document, "kernels", &table);
        write(&root().join(DOCUMENT), &fresh.unwrap_or_default())?;
    } else {
        faults.extend(pins::sync_differences(&kernels, documented));
    }
    // With another compiler or assembler the figures may differ, so only the limits are checked.
    if !refresh && same && documented != table {
        faults.push(format!(
            "{DOCUMENT}: the table of kernels is not what was built; `cargo xtask ptx --refresh` writes:\n{table}"
        ));
    }

    let probes = PROBES.build(&compiler)?;
    checked(&PROBES, &probes, &ptxas, &mut faults)?;
    let operations = section(&document, "memory operations")?;
    faults.extend(pins::memory_differences(&probes, operations));
    nvcc::example(&root().join("target/ptx/cuda"), ASSEMBLE_FOR[0])?;

    print!("{table}");
    if faults.is_empty() {
        println!("PTX: accepted for {}", ASSEMBLE_FOR.join(", "));
        Ok(())
    } else {
        Err(Failure::new(format!("PTX:\n{}", faults.join("\n"))))
    }
}

/// Checks an image's text and assembles it for every GPU.
fn checked(
    image: &Image,
    ptx: &str,
    ptxas: &Path,
    faults: &mut Vec<String>,
) -> Result<Vec<OnGpu>, Failure> {
    let named = |fault: String| format!("{}.ptx:{fault}", image.name);
    faults.extend(text::complaints(ptx, image.aligned).into_iter().map(named));
    faults.extend(committed::machine_paths(ptx).into_iter().map(named));
    let mut assembled = Vec::new();
    for &gpu in image.target.gpus() {
        let costs = assemble::assemble(ptxas, gpu, &image.built(), image.library)?;
        assembled.push(OnGpu { gpu, costs });
    }
    if !image.library {
        faults.extend(pins::excesses(&assembled));
    }
    Ok(assembled)
}

/// Compares the committed file with the build; with `refresh`, writes it.
fn with_committed(
    image: &Image,
    compiler: &Compiler,
    ptx: &str,
    refresh: bool,
    faults: &mut Vec<String>,
) -> Result<Verdict, Failure> {
    let Some(name) = image.committed else {
        return Ok(Verdict::Same);
    };
    let path = root().join(name);
    let fresh = committed::with_header(image, compiler, ptx);
    if refresh {
        write(&path, &fresh)?;
    }
    let verdict = committed::compare(&read(&path)?, &fresh);
    match verdict {
        Verdict::Same => println!("{name}: is what the sources give"),
        Verdict::Stale => faults.push(format!(
            "{name} is not what the sources give: run `cargo xtask ptx --refresh` and commit it"
        )),
        Verdict::OtherCompiler => println!("refresh PTX: {name} comes from another compiler"),
    }
    Ok(verdict)
}

/// Lists the machine code that the image was assembled to; with `refresh`, writes it for every GPU.
fn with_code(
    image: &Image,
    ptx: &str,
    ptxas: &Path,
    refresh: bool,
    list: &mut CodeList,
) -> Result<(), Failure> {
    let Some(name) = image.code else {
        return Ok(());
    };
    list.add_ptx(image, ptx);
    let mut codes = Vec::new();
    for gpu in code::CODE_FOR {
        if !image.target.gpus().contains(&gpu) {
            if !refresh {
                continue;
            }
            assemble::assemble(ptxas, gpu, &image.built(), image.library)?;
        }
        let path = assemble::assembled(&image.built(), gpu);
        let code = std::fs::read(&path)
            .map_err(|error| Failure::new(format!("{}: {error}", path.display())))?;
        list.add(image, gpu, &code);
        codes.push((gpu, code));
    }
    if refresh {
        let path = root().join(name);
        std::fs::write(&path, code::file(&codes))
            .map_err(|error| Failure::new(format!("{}: {error}", path.display())))?;
    }
    Ok(())
}

fn device_sources() -> Result<Vec<String>, Failure> {
    let mut found = Vec::new();
    let mut folders: Vec<PathBuf> = DEVICE_SOURCES.map(|folder| root().join(folder)).to_vec();
    while let Some(folder) = folders.pop() {
        let named = |error| Failure::new(format!("{}: {error}", folder.display()));
        for entry in std::fs::read_dir(&folder).map_err(named)? {
            let path = entry.map_err(named)?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let shown = path
                    .strip_prefix(root())
                    .unwrap_or(&path)
                    .display()
                    .to_string();
                found.extend(text::compiler_fences(&shown, &read(&path)?));
            }
        }
    }
    Ok(found)
}

fn section<'a>(document: &'a str, name: &str) -> Result<&'a str, Failure> {
    pins::section(document, name)
        .ok_or_else(|| Failure::new(format!("{DOCUMENT}: no section <!-- {name} -->")))
}

fn read(path: &Path) -> Result<String, Failure> {
    std::fs::read_to_string(path)
        .map_err(|error| Failure::new(format!("{}: {error}", path.display())))
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    std::fs::write(path, text).map_err(|error| Failure::new(format!("{}: {error}", path.display())))
}
