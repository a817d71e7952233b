//! Programs in C and C++ over the shared library, as a user builds them: plain, with the compiler's sanitizers, and
//! under valgrind.

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
    for name in ["libnvme_gpu.so", "libnvme_gpu.so.0"] {
        std::os::unix::fs::symlink(&library, folder.path(name)).unwrap();
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
    let program = folder.path(&source.replace('.', "-"));
    let (compiler, standard) = if is_c {
        ("cc", "-std=c11")
    } else {
        ("c++", "-std=c++17")
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
        .arg(here("tests/c").join(source))
        .arg("-o")
        .arg(&program)
        .arg("-L")
        .arg(&folder.0)
        .args(["-lnvme_gpu", "-lpthread", "-ldl"]);
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
    for source in ["errors.c", "gpu.c", "plus.cpp"] {
        let program = compile(&folder, source, flags);
        run(&folder, before, &program, &[]);
    }
}

#[test]
fn programs_in_c_and_cpp_use_every_function() {
    all("plain", &[], &[]);
}

#[test]
fn sanitizers_find_nothing_in_them() {
    all(
        "sanitized",
        &["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
        &[],
    );
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

/// What the library gives to the linker, and the name that programs ask the loader for.
#[test]
fn symbols_and_name_of_the_library_are_pinned() {
    let library = built("libnvme_gpu_capi.so");
    let output = Command::new("nm")
        .args(["--dynamic", "--defined-only", "--format=posix"])
        .arg(&library)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    let mut symbols: Vec<&str> = text
        .lines()
        .filter_map(|line| line.split(' ').next())
        .collect();
    symbols.sort_unstable();
    let pinned = here("tests/symbols.txt");
    let listed = symbols.join("\n") + "\n";
    if std::env::var_os("UPDATE_HEADER").is_some() {
        std::fs::write(&pinned, &listed).unwrap();
    }
    assert_eq!(std::fs::read_to_string(pinned).unwrap(), listed);
    let output = Command::new("readelf")
        .arg("-d")
        .arg(&library)
        .output()
        .unwrap();
    let text = said(&output);
    assert!(
        text.contains("[libnvme_gpu.so.0]") && text.contains("NODELETE"),
        "{text}"
    );
    assert!(!text.contains("libcuda"), "{text}");
}
