//! Programs in C and C++ over the shared library, as a user builds them: plain, with the compiler's sanitizers, and
//! under valgrind.

#[path = "programs/fio.rs"]
mod fio;
#[path = "programs/nixl.rs"]
mod nixl;

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A folder of its own, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("nvme-gpu-c-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// A shared library that cargo built beside the tests.
fn built(name: &str) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let folder = tests.parent().unwrap();
    let places = [folder.join(name), folder.join("..").join(name)];
    let found = places.into_iter().find(|path| path.exists());
    found.unwrap_or_else(|| panic!("cargo builds {name}"))
}

/// A folder with the library under its installed names, and the stand-in for CUDA.
fn folder(name: &str) -> Folder {
    let folder = Folder::new(name);
    let library = built("libnvme_gpu_capi.so");
    for name in ["libnvme_gpu.so", "libnvme_gpu.so.1"] {
        std::os::unix::fs::symlink(&library, folder.path(name)).unwrap();
    }
    let compat = built("libnvme_gpu_compat.so");
    for name in ["libnvme_gpu_compat.so", "libnvme_gpu_compat.so.0"] {
        std::os::unix::fs::symlink(&compat, folder.path(name)).unwrap();
    }
    let stand_in = built("libnvme_fake_cuda.so");
    std::os::unix::fs::symlink(stand_in, folder.path("libcuda.so.1")).unwrap();
    folder
}

fn said(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}

/// Compiles `source` with more `flags`, warnings as errors.
fn compile(folder: &Folder, source: &str, flags: &[&str]) -> PathBuf {
    let is_c = source.ends_with(".c");
    let name = Path::new(source).file_name().unwrap().to_str().unwrap();
    let program = folder.path(&name.replace('.', "-"));
    let (compiler, standard) = if is_c {
        ("cc", "-std=c11")
    } else {
        ("c++", "-std=c++17")
    };
    let is_compat = ["compat", "loader", "seeds", "demo_"]
        .iter()
        .any(|start| name.starts_with(start))
        || name == "fork.c";
    let library = if is_compat {
        "-lnvme_gpu_compat"
    } else {
        "-lnvme_gpu"
    };
    // Programs over the CUDA driver itself.
    let cuda: &[&str] = match name {
        "stream.c" | "device.c" | "gds.c" | "main.cpp" => &["-l:libcuda.so.1"],
        "unmapped.c" | "graphs.c" | "pages_gpu.c" => &["-l:libcuda.so.1"],
        "seeds.cpp" | "demo_gds.cpp" | "demo_spdk.cpp" => &["-l:libcuda.so.1"],
        "as_nixl.cpp" => &["-l:libcuda.so.1"],
        _ => &[],
    };
    let mut command = Command::new(compiler);
    command
        .args([
            standard,
            "-D_GNU_SOURCE",
            "-g",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Wpedantic",
            "-Werror",
        ])
        .args(flags)
        .arg("-I")
        .arg(here("include"))
        .arg("-I")
        .arg(here("../compat/include"))
        .arg("-I")
        .arg(here("../../../nvme-gpu-kernel/include"))
        .arg("-I")
        .arg(here("tests/c/stand_in"))
        .arg("-I")
        .arg(here("../../../nvme-gpu-kernel/examples/cuda-histogram"))
        .arg(here("tests/c").join(source))
        .arg("-o")
        .arg(&program)
        .arg("-L")
        .arg(&folder.0)
        .args([library, "-lpthread", "-ldl"])
        .args(cuda);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}\n{}", said(&output));
    program
}

/// Runs a compiled program, which says at its end that all was well.
fn run(folder: &Folder, before: &[&str], program: &Path, arguments: &[&str]) {
    let mut words: Vec<&str> = before.to_vec();
    words.push(program.to_str().unwrap());
    words.extend(arguments);
    let output = Command::new(words[0])
        .args(&words[1..])
        .env("LD_LIBRARY_PATH", &folder.0)
        .env("ASAN_OPTIONS", "detect_leaks=0")
        .env("UBSAN_OPTIONS", "halt_on_error=1")
        .output()
        .unwrap();
    let text = said(&output);
    assert!(
        output.status.success() && text.contains(": ok"),
        "{words:?}: {}\n{text}",
        output.status
    );
}

/// Every program, compiled with `flags` and run behind `before`.
fn all(name: &str, flags: &[&str], before: &[&str]) {
    let folder = folder(name);
    let image = folder.path("image");
    let file = std::fs::File::create(&image).unwrap();
    file.set_len((1 << 20) + 777).unwrap();
    let image = image.to_str().unwrap();
    let every = compile(&folder, "every.c", flags);
    let devices = [
        "sim:mem?size=1MiB&block=512".to_owned(),
        format!("file:{image}"),
        format!("sim:{image}.sim?size=2MiB&block=4096"),
    ];
    for device in &devices {
        run(&folder, before, &every, &[device]);
    }
    let ends = compile(&folder, "ends.c", flags);
    for device in &devices {
        run(&folder, before, &ends, &[device]);
    }
    let pages = compile(&folder, "pages.c", flags);
    for device in &devices {
        run(&folder, before, &pages, &[device]);
    }
    let pages = compile(&folder, "pages_gpu.c", flags);
    run(
        &folder,
        before,
        &pages,
        &["sim:mem?size=2MiB&block=512&queues=32", "gpu"],
    );
    run(&folder, before, &pages, &[&format!("file:{image}"), "cpu"]);
    let pages = compile(&folder, "pages_shared.c", flags);
    let sockets = folder.path("sockets");
    let mut private = std::fs::DirBuilder::new();
    private.mode(0o700).recursive(true);
    private.create(&sockets).unwrap();
    run(
        &folder,
        before,
        &pages,
        &[&format!("file:{image}"), sockets.to_str().unwrap()],
    );
    let program = compile(&folder, "loader.cpp", flags);
    run(&folder, before, &program, &[image]);
    for source in ["errors.c", "request.c", "changed.c", "gpu.c", "plus.cpp"] {
        let program = compile(&folder, source, flags);
        run(&folder, before, &program, &[]);
    }
    let program = compile(&folder, "pointers.c", flags);
    run(&folder, before, &program, &[&format!("file:{image}")]);
    // What a graph, or a kernel of the program's, may still use is never freed.
    let keeping: Vec<&str> = match before {
        [] => Vec::new(),
        valgrind => [valgrind, &["--leak-check=no"]].concat(),
    };
    let before = &keeping[..];
    let program = compile(&folder, "compat.c", flags);
    run(&folder, before, &program, &[image]);
    let program = compile(&folder, "stream.c", flags);
    // Valgrind runs the kernels of the stand-in a hundred times slower: each kind of call, not each repetition.
    let rounds: &[&str] = if before.is_empty() { &[] } else { &["10"] };
    run(&folder, before, &program, rounds);
    // Programs that a CUDA C++ user starts from: the image is not executed, its kernels are the stand-in's own.
    let example = here("../../../nvme-gpu-kernel/examples/cuda-histogram/main.cpp");
    let program = compile(&folder, example.to_str().unwrap(), flags);
    let device = here("../../../nvme-gpu-kernel/ptx/nvme_gpu_device.ptx");
    run(&folder, before, &program, &[device.to_str().unwrap()]);
    let program = compile(&folder, "device.c", flags);
    run(&folder, before, &program, &[device.to_str().unwrap()]);
    seeds(&folder, flags, before);
    let program = compile(&folder, "gds.c", flags);
    let image = folder.path("by-cufile");
    let image = image.to_str().unwrap();
    run(&folder, before, &program, &[image, "refused"]);
    let stand_in = built("libnvme_fake_cufile.so");
    std::os::unix::fs::symlink(stand_in, folder.path("libcufile.so.0")).unwrap();
    run(&folder, before, &program, &[image, "by direct"]);
}

/// The programs and test cases that the sketches name.
fn seeds(folder: &Folder, flags: &[&str], before: &[&str]) {
    let file = folder.path("seeds-file");
    let file = file.to_str().unwrap();
    let program = compile(folder, "seeds.cpp", flags);
    run(folder, before, &program, &[file]);
    let example = |name: &str| {
        let source = here("../compat/examples").join(name);
        compile(folder, source.to_str().unwrap(), flags)
    };
    let program = example("demo_gds.cpp");
    run(folder, before, &program, &[file, "12345", "4194304"]);
    let program = example("demo_spdk.cpp");
    let device = "NVME_GPU_DEVICE=sim:mem?size=4MiB&queues=32";
    run(folder, &[&["env", device], before].concat(), &program, &[]);
}

/// What goes wrong: many calls that cannot be obeyed, and every fault of the controller.
fn bad(name: &str, flags: &[&str]) {
    let folder = folder(name);
    let program = compile(&folder, "bad.c", flags);
    run(&folder, &[], &program, &[]);
    let image = folder.path("image");
    let program = compile(&folder, "faults.c", flags);
    run(&folder, &[], &program, &[image.to_str().unwrap()]);
    // Once: the header adds types alone.
    if !flags.is_empty() {
        let program = compile(&folder, "faults.cpp", flags);
        run(&folder, &[], &program, &[]);
    }
}

#[test]
fn what_goes_wrong_ends_with_a_status() {
    bad("bad", &[]);
}

#[test]
fn what_goes_wrong_is_clean_under_sanitizers() {
    bad("bad-sanitized", &SANITIZERS);
}

/// A child of fork() can use nothing of its parent's, and disturbs nothing.
fn forks(name: &str, flags: &[&str]) {
    let folder = folder(name);
    let image = |name: &str| {
        let path = folder.path(name);
        std::fs::write(&path, vec![7; 1 << 20]).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (file, of_layer) = (format!("file:{}", image("file")), image("of-layer"));
    let program = compile(&folder, "fork.c", flags);
    for device in ["sim:mem?size=4MiB&queues=32", &file] {
        run(&folder, &[], &program, &[device, &of_layer]);
    }
    let program = compile(&folder, "fork.cpp", flags);
    let simulated = format!("sim:{}?size=1MiB", image("simulated"));
    for device in ["sim:mem?size=4MiB", &simulated, &file] {
        run(&folder, &[], &program, &[device]);
    }
}

#[test]
fn a_child_of_a_fork_leaves_its_parents_devices_alone() {
    forks("fork", &[]);
}

#[test]
fn a_child_of_a_fork_is_clean_under_sanitizers() {
    forks("fork-sanitized", &SANITIZERS);
}

#[test]
fn a_launch_without_an_end_ends_the_wait_for_it() {
    let folder = folder("idle");
    let program = compile(&folder, "idle.c", &[]);
    run(&folder, &["env", "FAKE_CUDA=idle"], &program, &[]);
}

/// Programs about the lifetime of what calls are given, run with the compiler's sanitizers.
fn lifetimes(name: &str, source: &str) {
    let folder = folder(name);
    let program = compile(&folder, source, &SANITIZERS);
    let file = folder.path("file");
    run(&folder, &[], &program, &[file.to_str().unwrap()]);
}

#[test]
fn no_call_returns_while_its_memory_is_used() {
    lifetimes("unmapped", "unmapped.c");
}

#[test]
fn what_captures_take_comes_back_with_their_graphs() {
    lifetimes("graphs", "graphs.c");
}

const SANITIZERS: [&str; 2] = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"];

#[test]
fn programs_in_c_and_cpp_use_every_function() {
    all("plain", &[], &[]);
}

#[test]
fn sanitizers_find_nothing_in_them() {
    all("sanitized", &SANITIZERS, &[]);
}

#[test]
#[ignore = "needs valgrind"]
fn valgrind_finds_nothing_in_them() {
    let known = format!("--suppressions={}", here("tests/c/valgrind.supp").display());
    let valgrind = [
        "valgrind",
        "--quiet",
        "--error-exitcode=99",
        "--leak-check=full",
        "--errors-for-leak-kinds=definite",
        "--show-leak-kinds=definite",
        "--fair-sched=yes",
        &known,
    ];
    all("valgrind", &[], &valgrind);
}

/// Installed under a prefix, as docs/guide/c.md says.
fn installed(folder: &Folder) -> PathBuf {
    let prefix = folder.path("prefix");
    let mut install = Command::new(env!("CARGO"));
    install.args(["run", "--quiet", "--package", "xtask", "--", "install-c"]);
    // With what `cargo xtask test` sets here xtask would be compiled a second time.
    install.env_remove("CARGO_INCREMENTAL");
    install
        .arg(&prefix)
        .arg("--built")
        .arg(built("libnvme_gpu_capi.so").parent().unwrap());
    let output = install.current_dir(here("../../..")).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    prefix
}

/// The blocks of the guide in a language, in order.
fn guide(language: &str) -> Vec<String> {
    let text = std::fs::read_to_string(here("../../../docs/guide/c.md")).unwrap();
    let fence = format!("```{language}\n");
    let blocks = text.split(&fence).skip(1);
    blocks
        .map(|rest| rest.split("```").next().unwrap().to_owned())
        .collect()
}

#[test]
#[ignore = "needs pkg-config and cmake"]
fn what_is_installed_is_found_by_pkg_config_and_cmake() {
    let folder = Folder::new("installed");
    let prefix = installed(&folder);
    let (source, program) = (folder.path("guide.c"), folder.path("guide"));
    std::fs::write(&source, &guide("c")[0]).unwrap();
    let flags = |more: &[&str]| {
        let mut ask = Command::new("pkg-config");
        ask.args(["--cflags", "--libs"]).args(more).arg("nvme_gpu");
        let output = ask
            .env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", said(&output));
        let words = String::from_utf8(output.stdout).unwrap();
        words
            .split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<String>>()
    };
    let path = format!("-Wl,-rpath,{}", prefix.join("lib").display());
    let library = prefix.join("lib/libnvme_gpu.a").display().to_string();
    let fixed: Vec<String> = flags(&["--static"])
        .into_iter()
        .map(|word| match word.as_str() {
            "-lnvme_gpu" => library.clone(),
            _ => word,
        })
        .collect();
    for (name, words) in [("shared", flags(&[])), ("static", fixed)] {
        let mut compile = Command::new("cc");
        compile
            .arg("-Wall")
            .arg("-Werror")
            .arg(&source)
            .arg("-o")
            .arg(&program)
            .args(words)
            .arg(&path);
        let output = compile.output().unwrap();
        assert!(output.status.success(), "{name}: {}", said(&output));
        let output = Command::new(&program)
            .current_dir(&folder.0)
            .output()
            .unwrap();
        assert!(output.status.success(), "{name}: {}", said(&output));
    }
    let project = "cmake_minimum_required(VERSION 3.16)\nproject(p C)\nfind_package(nvme_gpu 0.1 REQUIRED)\n\
                   add_executable(p guide.c)\ntarget_link_libraries(p nvme_gpu::nvme_gpu)\n\
                   add_executable(s guide.c)\ntarget_link_libraries(s nvme_gpu::nvme_gpu_static)\n";
    std::fs::write(folder.path("CMakeLists.txt"), project).unwrap();
    let build = folder.path("build");
    let mut configure = Command::new("cmake");
    configure.arg("-S").arg(&folder.0).arg("-B").arg(&build);
    configure.arg(format!("-DCMAKE_PREFIX_PATH={}", prefix.display()));
    let mut make = Command::new("cmake");
    make.arg("--build").arg(&build);
    for mut command in [
        configure,
        make,
        Command::new(build.join("p")),
        Command::new(build.join("s")),
    ] {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{command:?}: {}", said(&output));
    }
}

/// Each C block of the guide is a program that ends with 0, and so are the lines of the README.
#[test]
fn the_programs_of_the_guide_run() {
    let folder = folder("guide");
    let (blocks, in_cpp) = (guide("c"), guide("cpp"));
    assert!(blocks.len() >= 4 && !in_cpp.is_empty(), "{}", blocks.len());
    let readme = std::fs::read_to_string(here("../../../README.md")).unwrap();
    let of_readme = |fence: &str| {
        let rest = readme.split(fence).nth(1).unwrap();
        rest.split("```").next().unwrap().to_owned()
    };
    let lines = of_readme("```cpp\n");
    let of_cpp = format!(
        "#include <nvme_gpu.hpp>\nint main() {{\n{lines}return rows[0] != 'o' || rows[1] != 'h';\n}}\n"
    );
    let lines = of_readme("```c\n");
    let readme = format!(
        "#include <nvme_gpu.h>\nint main(void)\n{{\nchar data[512];\n{lines}return status;\n}}\n"
    );
    let in_c = blocks.iter().chain([&readme]).map(|block| (block, "c"));
    let in_cpp = in_cpp.iter().chain([&of_cpp]);
    let all = in_c.chain(in_cpp.map(|block| (block, "cpp")));
    for (index, (block, language)) in all.enumerate() {
        let source = folder.path(&format!("guide{index}.{language}"));
        std::fs::write(&source, block).unwrap();
        let program = compile(&folder, source.to_str().unwrap(), &[]);
        let mut command = Command::new(program);
        let output = command
            .env("LD_LIBRARY_PATH", &folder.0)
            .current_dir(&folder.0)
            .output()
            .unwrap();
        assert!(output.status.success(), "block {index}: {}", said(&output));
    }
}

/// The symbols that a library gives to the linker are those of `pinned`.
fn check_symbols(library: &Path, pinned: &Path) {
    let mut names = Command::new("nm");
    names.args(["--dynamic", "--defined-only", "--format=posix"]);
    let output = names.arg(library).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    let mut symbols: Vec<&str> = text
        .lines()
        .filter_map(|line| line.split(' ').next())
        .collect();
    symbols.sort_unstable();
    let listed = symbols.join("\n") + "\n";
    if std::env::var_os("UPDATE_HEADER").is_some() {
        std::fs::write(pinned, &listed).unwrap();
    }
    assert_eq!(std::fs::read_to_string(pinned).unwrap(), listed);
}

/// Symbols, and the names that programs ask the loader for.
#[test]
fn symbols_and_names_of_the_libraries_are_pinned() {
    for (library, name, pinned) in [
        (
            "libnvme_gpu_capi.so",
            "libnvme_gpu.so.1",
            "tests/symbols.txt",
        ),
        (
            "libnvme_gpu_compat.so",
            "libnvme_gpu_compat.so.0",
            "../compat/symbols.txt",
        ),
    ] {
        let library = built(library);
        check_symbols(&library, &here(pinned));
        let output = Command::new("readelf")
            .arg("-d")
            .arg(&library)
            .output()
            .unwrap();
        let text = said(&output);
        assert!(
            text.contains(&format!("[{name}]")) && text.contains("NODELETE"),
            "{text}"
        );
        assert!(!text.contains("libcuda"), "{text}");
    }
}
