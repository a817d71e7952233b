//! The rules that hold the parts apart, checked over the sources.

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_path_buf()
}

/// Returns every Rust file under `folder` of the workspace, as (path from the root, text).
fn sources(folder: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            if path.is_dir() && name != "target" {
                folders.push(path);
            } else if name.ends_with(".rs") {
                let relative = path
                    .strip_prefix(root())
                    .unwrap()
                    .to_str()
                    .unwrap()
                    .to_string();
                found.push((relative, fs::read_to_string(&path).unwrap()));
            }
        }
    }
    assert!(!found.is_empty(), "no sources under {folder}");
    found
}

/// Returns the code of a line: no comment.
fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or("")
}

fn report(offenders: Vec<String>) {
    assert!(offenders.is_empty(), "\n{}", offenders.join("\n"));
}

/// The auditor trusts neither side: it depends only on the wire types.
#[test]
fn the_auditor_depends_on_the_wire_types_alone() {
    let manifest = fs::read_to_string(root().join("sim/auditor/Cargo.toml")).unwrap();
    let dependencies: Vec<&str> = manifest
        .lines()
        .skip_while(|line| !line.contains("dependencies]"))
        .skip(1)
        .take_while(|line| !line.starts_with('['))
        .filter(|line| !line.is_empty())
        .collect();
    assert_eq!(dependencies, ["nvme-spec.workspace = true"]);
}

/// The driver core imports none of its users, and controllers share only the wire types with it.
#[test]
fn dependencies_point_one_way() {
    for (package, banned) in [
        ("host-shell/bindings/python", &["nvme-gpu", "nvme-sim"][..]),
        ("host-shell/cuda", &["nvme-host", "nvme-store"]),
        ("host-shell/store", &["nvme-host", "nvme-files"]),
        ("host-shell/files", &["nvme-host", "nvme-bench"]),
        ("host-shell/kv", &["nvme-host", "nvme-files", "nvme-sim"]),
        ("host-shell/kv-server", &["nvme-host", "nvme-sim"]),
        ("host-shell/doctor", &["nvme-host", "nvme-store"]),
        (
            "host-shell/driver",
            &["nvme-host", "nvme-gpu-kernel", "cudarc"],
        ),
        ("nvme-core/spec", &["nvme-core", "nvme-sim", "nvme-host"]),
        (
            "nvme-core",
            &["nvme-sim", "nvme-host", "nvme-gpu", "nvme-gpu-kernel"],
        ),
        (
            "sim",
            &["nvme-core", "nvme-host", "nvme-gpu", "nvme-gpu-kernel"],
        ),
        ("tests/gpu/peer", &["nvme-core", "nvme-sim", "nvme-host"]),
        ("nvme-gpu-kernel", &["nvme-sim", "nvme-host", "nvme-gpu"]),
    ] {
        let manifest = fs::read_to_string(root().join(package).join("Cargo.toml")).unwrap();
        for line in manifest.lines() {
            let key = line.split(['.', ' ', '=']).next().unwrap_or("");
            assert!(!banned.contains(&key), "{package} depends on {key}");
        }
    }
}

/// In the driver, the folders that access a controller import nothing of the running controller.
#[test]
fn the_folders_of_the_driver_point_one_way() {
    for (folder, banned) in [
        ("driver/src/device", &["controller"][..]),
        ("driver/src/dma", &["controller"]),
    ] {
        let mut offenders = Vec::new();
        for (path, text) in sources(&format!("host-shell/{folder}")) {
            for (number, line) in text.lines().enumerate() {
                let line = code(line);
                if banned.iter().any(|other| names_folder(line, other)) {
                    offenders.push(format!("{path}:{}: {line}", number + 1));
                }
            }
        }
        report(offenders);
    }
}

/// Returns whether `line` names the module `folder` of the crate's root.
fn names_folder(line: &str, folder: &str) -> bool {
    let mut paths = line.split("crate::").skip(1);
    paths.any(|path| {
        path.split(|c: char| !c.is_alphanumeric() && c != '_')
            .next()
            == Some(folder)
    })
}

#[test]
fn a_folder_that_is_named_would_be_found() {
    assert!(names_folder(
        "    memory: &Arc<crate::cuda::DeviceMemory>,",
        "cuda"
    ));
    assert!(!names_folder("use crate::cuda_like::X;", "cuda"));
}

/// Lines of the functions of a formatted file, from `fn` to the brace that closes it.
fn functions(text: &str) -> Vec<(usize, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (first, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let indent = &line[..line.len() - code.len()];
        let is_function =
            code.starts_with("fn ") || code.contains(" fn ") && code.starts_with("pub");
        if !is_function || line.ends_with(';') || line.ends_with('}') {
            continue;
        }
        let close = format!("{indent}}}");
        let rest = lines[first..].iter();
        let end = rest.clone().position(|line| *line == close);
        found.push((first + 1, end.map_or(0, |end| end + 1)));
    }
    found
}

/// The threshold of clippy.toml, whose lint is in no group that is on.
#[test]
fn no_function_is_longer_than_the_longest_today() {
    let clippy = fs::read_to_string(root().join("clippy.toml")).unwrap();
    let most = clippy
        .lines()
        .find_map(|line| line.strip_prefix("too-many-lines-threshold = "));
    let most: usize = most.unwrap().parse().unwrap();
    let (mut offenders, mut longest) = (Vec::new(), 0);
    for folder in ["nvme-core", "nvme-gpu-kernel/src", "host-shell", "sim"] {
        for (path, text) in sources(folder) {
            for (line, lines) in functions(&text) {
                longest = longest.max(lines);
                if lines > most {
                    offenders.push(format!("{path}:{line}: {lines} lines"));
                }
            }
        }
    }
    assert!(longest > most / 2, "functions are found: {longest}");
    report(offenders);
}

/// Programs that link the host library get no dependency that only the tool needs: command line, charts, progress.
#[test]
fn the_host_library_is_free_of_what_only_the_tool_needs() {
    let tree = |package: &str| {
        let output = std::process::Command::new(env!("CARGO"))
            .args([
                "tree",
                "--offline",
                "--locked",
                "--all-features",
                "--package",
                package,
            ])
            .args(["--edges", "normal", "--prefix", "none", "--format", "{p}"])
            .current_dir(root())
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{error}");
        let text = String::from_utf8(output.stdout).unwrap();
        let names = text.lines().filter_map(|line| line.split(' ').next());
        names.map(str::to_string).collect::<Vec<String>>()
    };
    let (library, tool) = (tree("nvme-host"), tree("nvme-gpu"));
    for name in [
        "clap",
        "clap_complete",
        "clap_mangen",
        "font8x8",
        "indicatif",
        "plotters",
        "png",
        "ratatui",
        "signal-hook",
    ] {
        assert!(
            tool.iter().any(|used| used == name),
            "the search finds {name}"
        );
        assert!(
            !library.iter().any(|used| used == name),
            "nvme-host pulls in {name}"
        );
    }
}

/// Files in which unsafe code may be written. A longer list needs its own commit with a reason.
const UNSAFE_MODULES: [&str; 99] = [
    "nvme-core/src/handoff.rs",
    "nvme-core/tests/handoff.rs",
    "nvme-core/src/mem.rs",
    "nvme-core/src/sync/nvptx.rs",
    // A barrier of aarch64 for devices has no stable intrinsic.
    "nvme-core/src/sync/outer.rs",
    "nvme-core/src/sync/tsan.rs",
    "nvme-core/src/registers.rs",
    "nvme-gpu-kernel/",
    "sim/src/memory.rs",
    "host-shell/driver/src/device/bar.rs",
    "host-shell/driver/src/device/ring_memory.rs",
    // Calls of the kernel module.
    "host-shell/driver/src/device/kmod/uapi.rs",
    "host-shell/driver/src/device/vfio/",
    "host-shell/driver/src/dma/pages.rs",
    "host-shell/driver/src/dma/pair.rs",
    "host-shell/driver/src/dma/region.rs",
    "host-shell/driver/src/dma/shared.rs",
    // A function that each child of a fork calls.
    "host-shell/driver/src/process_mark.rs",
    // ioctls that describe a file: the kernel gets addresses of structures.
    "host-shell/files/src/files/mounted/ioctl.rs",
    // ioctls that name the file below a loop device and the open files of a thread: no file of the kernel lists either.
    "host-shell/driver/src/sysfs/usage/calls.rs",
    // Maps the page of counters that other processes read.
    "host-shell/store/src/counters/mapping.rs",
    // The kernel gets addresses of slots: submission entries of io_uring are raw.
    "host-shell/store/src/file/uring.rs",
    // Locks of ranges of a file: the kernel gets the address of a structure.
    "host-shell/store/src/file/range_lock.rs",
    // Gathers get GPU memory by its address.
    "host-shell/store/src/gds.rs",
    "host-shell/store/src/bytes_on_gpu.rs",
    "host-shell/store/src/halves.rs",
    "host-shell/store/src/on_gpu.rs",
    "host-shell/files/src/loader/on_gpu.rs",
    "host-shell/files/src/loader/verifier.rs",
    // The benches of `bench --paths` do, too, and they fill pinned memory.
    "host-shell/bench/src/paths/on_gpu.rs",
    "host-shell/bench/src/rows_on_gpu.rs",
    // These files launch kernels over their own memory and over memory of layers.
    "host-shell/models/examples/experts/main.rs",
    "host-shell/models/examples/experts/prompt.rs",
    "host-shell/compute/examples/resident.rs",
    "host-shell/examples/small_gathers.rs",
    "host-shell/models/src/experts/gpu.rs",
    "host-shell/models/src/experts/gpu/step.rs",
    "host-shell/models/src/experts/staged.rs",
    "host-shell/models/src/machine/gpu.rs",
    "host-shell/compute/src/bench/",
    // Products and attention of vectors that the caller knows by address.
    "host-shell/models/src/choosing.rs",
    "host-shell/models/src/experts/router.rs",
    "host-shell/course/src/ladder/bench.rs",
    "host-shell/course/src/ladder/gpu.rs",
    "host-shell/models/src/paged.rs",
    "host-shell/course/src/pipeline/by_gpu.rs",
    "host-shell/course/src/flash/gpu.rs",
    "host-shell/course/src/linear/gpu.rs",
    "host-shell/course/examples/ladder.rs",
    "host-shell/compute/src/steps/gpu.rs",
    "host-shell/compute/src/gathered.rs",
    "host-shell/compute/src/gemm.rs",
    "host-shell/compute/src/streamed.rs",
    "host-shell/models/examples/paged_attention.rs",
    // So are queries and their results.
    "host-shell/search/src/gpu.rs",
    "host-shell/lookup/src/on_gpu.rs",
    "host-shell/kv/src/on_gpu/way.rs",
    // Functions of C, over memory that C vouches for.
    "host-shell/bindings/c/src/",
    "host-shell/bindings/compat/src/",
    // Memory of Python's buffers and of DLPack is known by address, also to threads that have no GIL.
    "host-shell/bindings/python/src/begun.rs",
    "host-shell/bindings/python/src/compute/",
    "host-shell/bindings/python/src/dlpack.rs",
    "host-shell/bindings/python/src/lookup.rs",
    "host-shell/bindings/python/src/pages.rs",
    "host-shell/bindings/python/src/ngrams.rs",
    "host-shell/bindings/python/src/pool.rs",
    "host-shell/bindings/python/src/search.rs",
    "host-shell/bindings/python/src/store.rs",
    "host-shell/bindings/python/src/table.rs",
    "host-shell/bindings/python/src/view.rs",
    "host-shell/tool/src/stdio.rs",
    "host-shell/cuda/src/",
    "host-shell/bench/src/gpu/",
    "host-shell/bench/src/null/",
    "tests/src/memory.rs",
    "tests/fake-cuda/",
    "tests/simulate/src/rows/launch.rs",
    "tests/simulate/src/rows/stripes/launch.rs",
    "tests/fake-cufile/",
    "tests/gpu/",
    // Requests of rows, calls of the kernel module with wrong arguments, and of udmabuf.
    "tests/guest/src/exporter.rs",
    "tests/guest/src/gathers.rs",
    "tests/guest/src/node/bar.rs",
    "tests/guest/src/node/calls.rs",
    "tests/guest/src/node/compat.rs",
    "tests/guest/src/node/errors.rs",
    "tests/guest/src/node/fuse.rs",
    "tests/guest/src/node/fuzz.rs",
    "tests/guest/src/node/limits.rs",
    "tests/guest/src/node/machine.rs",
    "tests/guest/src/node/memory.rs",
    "tests/guest/src/node/node.rs",
    "tests/guest/src/node/nvme.rs",
    "tests/guest/src/node/partial.rs",
    "tests/guest/src/node/stops.rs",
    "tests/guest/src/node/waits.rs",
    "tests/guest/src/peer.rs",
    "tests/guest/src/spdk.rs",
    "tests/stress/src/plain.rs",
];

#[test]
fn unsafe_code_is_opened_only_where_it_is_allowed_and_says_why() {
    let mut offenders = Vec::new();
    for module in UNSAFE_MODULES {
        if !root().join(module).exists() {
            offenders.push(format!("{module} is listed and not there"));
        }
    }
    let mut opened = 0;
    for folder in [
        "nvme-core",
        "nvme-gpu-kernel",
        "sim",
        "host-shell",
        "tests",
        "fuzz",
    ] {
        for (path, text) in sources(folder) {
            let lines: Vec<&str> = text.lines().collect();
            for (number, line) in lines.iter().enumerate() {
                let opens =
                    line.trim_start().starts_with("#") && line.contains("allow(unsafe_code)");
                if !opens {
                    continue;
                }
                opened += 1;
                let listed = UNSAFE_MODULES.iter().any(|module| path.starts_with(module));
                let reasoned = lines[..number]
                    .iter()
                    .any(|line| line.starts_with("// UNSAFETY: "));
                if !listed || !reasoned {
                    offenders.push(format!(
                        "{path}:{}: listed: {listed}, // UNSAFETY: {reasoned}",
                        number + 1
                    ));
                }
            }
        }
    }
    assert!(
        opened > 0,
        "the search found not even the modules that are allowed"
    );
    report(offenders);
}

/// Returns the folder of each package, and its manifest.
fn packages() -> Vec<(String, String)> {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let members = manifest
        .lines()
        .find(|line| line.starts_with("members = "))
        .unwrap();
    let read = |member: &str| {
        let text = fs::read_to_string(root().join(member).join("Cargo.toml")).unwrap();
        (member.to_string(), text)
    };
    members.split('"').skip(1).step_by(2).map(read).collect()
}

/// Such a target would be compiled a second time for nothing, and with `test = false` none of its tests would run.
#[test]
fn a_library_without_unit_tests_has_none() {
    let mut offenders = Vec::new();
    let quiet = packages()
        .into_iter()
        .filter(|(_, manifest)| manifest.lines().any(|line| line == "test = false"));
    for (member, _) in quiet {
        for (path, text) in sources(&format!("{member}/src")) {
            if text.lines().any(|line| code(line).contains("#[test]")) {
                offenders.push(format!("{path}: {member}/Cargo.toml says test = false"));
            }
        }
    }
    report(offenders);
}

#[test]
fn every_package_takes_the_lints_of_the_workspace() {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    assert!(manifest.contains("unsafe_code = \"deny\""));
    for (member, text) in packages() {
        assert!(
            text.contains("[lints]\nworkspace = true"),
            "{member} does not take the workspace's lints"
        );
    }
}

/// The core uses the atomics of `nvme_core::sync` alone: the NVPTX back end drops the memory order of other atomics.
#[test]
fn the_core_takes_its_atomics_from_one_place() {
    let mut offenders = Vec::new();
    for (path, text) in sources("nvme-core/src")
        .into_iter()
        .chain(sources("nvme-gpu-kernel/src"))
    {
        // The second is compiled for tests alone: threads of the host as members of a group.
        if path.starts_with("nvme-core/src/sync/") || path.starts_with("nvme-core/src/sequences/") {
            continue;
        }
        for (number, line) in text.lines().enumerate() {
            let line = code(line);
            if line.contains("sync::atomic") || line.contains("compiler_fence") {
                offenders.push(format!("{path}:{}: {line}", number + 1));
            }
        }
    }
    report(offenders);
}
