//! Packages of Debian: the tool, the C libraries, their headers, and the kernel module for dkms.

use super::programs::{built, describe};
use super::{Architecture, GLIBC, Release, VERSION, files};
use crate::install_c::{self, CInstallation};
use chores::process::{Failure, check, output, root};
use chores::report::Counts;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Number of the packaging, after the version.
const REVISION: &str = "1";
const LIBRARY: &str = "libnvme-gpu1";
const COMPAT: &str = "libnvme-gpu-compat0";
const DKMS: &str = "nvme-gpu-dkms";

/// A package in the making.
struct Package {
    name: &'static str,
    /// `amd64`, `arm64` or `all`.
    architecture: &'static str,
    section: &'static str,
    /// Further fields of the control file, whole lines.
    fields: String,
    /// The first line is the synopsis.
    description: &'static str,
    license: &'static str,
    /// Findings of lintian that are meant, each with its reason as a comment.
    overrides: &'static str,
    /// Further files of DEBIAN/, each with its permissions.
    control: Vec<(&'static str, String, u32)>,
}

/// Makes every package, and lets lintian judge them.
pub fn make(release: &Release) -> Result<Counts, Failure> {
    let mut counts = Counts::default();
    files::remove_ending(&release.artefacts, "_all.deb")?;
    let maker = maintainer()?;
    let mut made = Vec::new();
    for &architecture in &release.architectures {
        let end = format!("_{}.deb", architecture.debian);
        files::remove_ending(&release.artefacts, &end)?;
        made.push(tool(release, architecture, &maker)?);
        made.extend(libraries(release, architecture, &maker)?);
    }
    made.push(module(release, &maker)?);
    for package in made {
        let mut lintian = Command::new("lintian");
        lintian.args(["--fail-on", "error,warning", "--tag-display-limit", "0"]);
        // The packages are not for Debian's own archive, where the first upload closes a request.
        lintian.args(["--suppress-tags", "initial-upload-closes-no-bugs"]);
        check(lintian.arg("--allow-root").arg(package))?;
        counts.add(Counts::PASSED);
    }
    Ok(counts)
}

/// Returns the file name of a package.
pub fn file_name(name: &str, architecture: &str) -> String {
    format!("{name}_{VERSION}-{REVISION}_{architecture}.deb")
}

/// Returns who makes the packages, as Debian's tools ask for it: $DEBFULLNAME and $DEBEMAIL, else git's user.
fn maintainer() -> Result<String, Failure> {
    let known = |variable: &str, key: &str| match std::env::var(variable) {
        Ok(value) => Ok(value),
        Err(_) => output(Command::new("git").args(["config", key]))
            .map_err(|_| Failure::missing(format!("packages name their maker: set {variable}="))),
    };
    let name = known("DEBFULLNAME", "user.name")?;
    let mail = known("DEBEMAIL", "user.email")?;
    Ok(format!("{} <{}>", name.trim(), mail.trim()))
}

fn libc() -> String {
    format!("libc6 (>= {}.{})", GLIBC.0, GLIBC.1)
}

fn stage(release: &Release, name: &str, architecture: &str) -> Result<PathBuf, Failure> {
    let stage = release
        .work
        .join("packages")
        .join(format!("{name}-{architecture}"));
    files::empty_folder(&stage)?;
    files::allow(&stage, 0o755)?;
    Ok(stage)
}

fn tool(release: &Release, architecture: Architecture, maker: &str) -> Result<PathBuf, Failure> {
    let package = Package {
        name: "nvme-gpu",
        architecture: architecture.debian,
        section: "utils",
        fields: format!(
            "Depends: {}, libgcc-s1 (>= 4.2)\nSuggests: {DKMS}\n",
            libc()
        ),
        description: "disks, images and benchmarks of NVMe controllers from user space\n\
            The tool of nvme-gpu, a driver for NVMe controllers that also runs inside CUDA kernels. It\n\
            reads, writes, measures and administers drives behind VFIO or the module nvme_gpu, and a\n\
            simulated controller that needs no hardware. CUDA is looked up when it runs.",
        license: BOTH,
        overrides: "# Programs of Rust link its libraries into themselves; a release is built from what Cargo.lock names.\n\
            nvme-gpu: embedded-library *\n",
        control: Vec::new(),
    };
    let stage = stage(release, package.name, package.architecture)?;
    let tool = built(architecture, "gnu").join("nvme-gpu");
    files::copy(&tool, &stage.join("usr/bin/nvme-gpu"), 0o755)?;
    describe(
        (architecture, "gnu"),
        &stage.join("usr"),
        "share/zsh/vendor-completions/_nvme-gpu",
        "share/fish/vendor_completions.d/nvme-gpu.fish",
    )?;
    let manual = stage.join("usr/share/man/man1");
    for page in files::names(&manual)? {
        compress(&manual.join(page))?;
    }
    finish(release, &package, &stage, maker)
}

fn libraries(
    release: &Release,
    architecture: Architecture,
    maker: &str,
) -> Result<Vec<PathBuf>, Failure> {
    let whole = stage(release, "c", architecture.debian)?;
    let folder = format!("lib/{}", architecture.triplet());
    install_c::install(&CInstallation {
        prefix: Path::new("/usr"),
        stage: &whole,
        libraries: &folder,
        built: &built(architecture, "gnu"),
    })?;
    let libraries = whole.join("usr").join(&folder);
    let mut strip = Command::new(format!("{}-strip", architecture.triplet()));
    strip.args(["--strip-debug", "--enable-deterministic-archives"]);
    check(strip.arg(libraries.join("libnvme_gpu.a")))?;
    let mut made = Vec::new();
    for (package, library) in [(LIBRARY, "libnvme_gpu"), (COMPAT, "libnvme_gpu_compat")] {
        made.push(library_package(
            release,
            architecture,
            (package, library),
            (&libraries, maker),
        )?);
    }
    let package = Package {
        name: "libnvme-gpu-dev",
        architecture: architecture.debian,
        section: "libdevel",
        fields: format!(
            "Depends: {LIBRARY} (= {VERSION}-{REVISION}), {COMPAT} (= {VERSION}-{REVISION})\n\
             Multi-Arch: same\n"
        ),
        description: "headers for rows and bytes of NVMe drives, for C, C++ and CUDA\n\
            Headers, the static library, the pkg-config file and the CMake package of nvme-gpu, with the\n\
            device library for kernels in CUDA C++ as PTX.",
        license: BOTH,
        overrides: "",
        control: Vec::new(),
    };
    made.push(finish(release, &package, &whole, maker)?);
    Ok(made)
}

/// Moves a shared library out of `libraries`, where its development files stay, into its package.
fn library_package(
    release: &Release,
    architecture: Architecture,
    (name, library): (&'static str, &str),
    (libraries, maker): (&Path, &str),
) -> Result<PathBuf, Failure> {
    let stage = stage(release, name, architecture.debian)?;
    let to = stage.join("usr/lib").join(architecture.triplet());
    files::make_folder(&to)?;
    let versioned = format!("{library}.so.");
    for file in files::names(libraries)? {
        if file.starts_with(&versioned) {
            let moved = std::fs::rename(libraries.join(&file), to.join(&file));
            moved.map_err(|error| Failure::new(format!("cannot move {file}: {error}")))?;
            if !to.join(&file).is_symlink() {
                files::allow(&to.join(&file), 0o644)?;
            }
        }
    }
    let interface = name.trim_start_matches(|c: char| !c.is_ascii_digit());
    let package = Package {
        name,
        architecture: architecture.debian,
        section: "libs",
        fields: format!(
            "Depends: {}, libgcc-s1 (>= 4.2)\nMulti-Arch: same\n",
            libc()
        ),
        description: match name {
            LIBRARY => {
                "rows and bytes of NVMe drives by a GPU or the CPU\n\
                 The C library of nvme-gpu: drives, files and stripes by bytes of any length and by rows,\n\
                 gathers by a GPU, without the CPU in the data path. CUDA is looked up when it runs."
            }
            _ => {
                "nvme-gpu under the names of sketches for cuFile and SPDK\n\
                 A layer over the C library of nvme-gpu that offers the calls which sketches for cuFile,\n\
                 SPDK and loaders of layers use."
            }
        },
        license: BOTH,
        overrides: "",
        control: vec![
            (
                "shlibs",
                format!("{library} {interface} {name} (>= {VERSION})\n"),
                0o644,
            ),
            ("triggers", "activate-noawait ldconfig\n".to_owned(), 0o644),
        ],
    };
    finish(release, &package, &stage, maker)
}

fn module(release: &Release, maker: &str) -> Result<PathBuf, Failure> {
    let package = Package {
        name: DKMS,
        architecture: "all",
        section: "kernel",
        fields: "Depends: dkms (>= 3)\nMulti-Arch: foreign\n".to_owned(),
        description: "kernel module nvme_gpu, built by dkms\n\
            A driver of an NVMe function for programs that drive its queues: it maps registers, memory of\n\
            the program and memory of a GPU, and takes all of it back, whatever becomes of the program.\n\
            For Linux 6.12 and newer on x86-64. Users of the nodes are named in its udev rule.",
        license: KERNEL,
        overrides: "# The administrator says there who may open the nodes: an edited rule is kept, as a conffile.\n\
            nvme-gpu-dkms: udev-rule-in-etc *\n",
        control: vec![
            (
                "postinst",
                INSTALL_MODULE.replace("@VERSION@", VERSION),
                0o755,
            ),
            ("prerm", REMOVE_MODULE.replace("@VERSION@", VERSION), 0o755),
            ("conffiles", format!("/etc/udev/rules.d/{RULE}\n"), 0o644),
        ],
    };
    let stage = stage(release, package.name, package.architecture)?;
    let sources = stage.join(format!("usr/src/nvme-gpu-{VERSION}"));
    let from = root().join("kmod");
    for name in files::names(&from)? {
        let is_source = name.ends_with(".c") || name.ends_with(".h");
        if is_source || ["Kbuild", "dkms.conf"].contains(&name.as_str()) {
            files::copy(&from.join(&name), &sources.join(&name), 0o644)?;
        }
    }
    let rule = stage.join("etc/udev/rules.d").join(RULE);
    files::copy(&from.join(RULE), &rule, 0o644)?;
    finish(release, &package, &stage, maker)
}

const RULE: &str = "60-nvme-gpu.rules";
const INSTALL_MODULE: &str = include_str!("scripts/postinst.sh");
const REMOVE_MODULE: &str = include_str!("scripts/prerm.sh");

const BOTH: &str = "License: MIT or Apache-2.0\n\
    \x20Either of the two, as you choose. The Apache License 2.0 is in\n\
    \x20/usr/share/common-licenses/Apache-2.0 on Debian systems. The MIT License:\n";
const KERNEL: &str = "License: GPL-2\n\
    \x20Version 2 of the GNU General Public License alone, which is in\n\
    \x20/usr/share/common-licenses/GPL-2 on Debian systems. nvme_gpu_uapi.h may be used\n\
    \x20under that license with the Linux syscall note, or under the MIT License.\n";

/// Adds what each package has, and packs it.
fn finish(
    release: &Release,
    package: &Package,
    stage: &Path,
    maker: &str,
) -> Result<PathBuf, Failure> {
    let documents = stage.join("usr/share/doc").join(package.name);
    files::write(&documents.join("copyright"), &copyright(package)?)?;
    let changes = documents.join("changelog.Debian");
    files::write(&changes, &changelog(release, maker)?)?;
    compress(&changes)?;
    if !package.overrides.is_empty() {
        let overrides = stage.join("usr/share/lintian/overrides").join(package.name);
        files::write(&overrides, package.overrides)?;
    }
    let control = stage.join("DEBIAN");
    let mut sums = Command::new("sh");
    sums.args([
        "-c",
        "find . -type f -printf '%P\\0' | sort -z | xargs -0 md5sum",
    ]);
    let sums = output(sums.current_dir(stage))?;
    let size = output(
        Command::new("du")
            .args(["-sk", "--apparent-size"])
            .arg(stage),
    )?;
    let size = size.split_whitespace().next().unwrap_or("0");
    files::write(&control.join("md5sums"), &sums)?;
    let text = format!(
        "Package: {}\nSource: nvme-gpu\nVersion: {VERSION}-{REVISION}\nArchitecture: {}\n\
         Maintainer: {maker}\nInstalled-Size: {size}\n{}Section: {}\nPriority: optional\n\
         Description: {}\n",
        package.name,
        package.architecture,
        package.fields,
        package.section,
        folded(package.description)
    );
    files::write(&control.join("control"), &text)?;
    for (name, text, mode) in &package.control {
        files::write(&control.join(name), text)?;
        files::allow(&control.join(name), *mode)?;
    }
    let file = release
        .artefacts
        .join(file_name(package.name, package.architecture));
    let mut build = Command::new("dpkg-deb");
    build.args(["--root-owner-group", "-Zxz", "--build"]);
    build.env("SOURCE_DATE_EPOCH", &release.time);
    check(build.arg(stage).arg(&file))?;
    Ok(file)
}

/// Returns a description as control files have it: the synopsis, then lines of at most 79 columns after a space.
fn folded(description: &str) -> String {
    let (synopsis, rest) = description.split_once('\n').unwrap_or((description, ""));
    let (mut text, mut columns) = (synopsis.to_owned(), 80);
    for word in rest.split_whitespace() {
        match columns + 1 + word.len() < 80 {
            true => text += " ",
            false => {
                text += "\n ";
                columns = 0;
            }
        }
        text += word;
        columns += 1 + word.len();
    }
    text
}

fn compress(file: &Path) -> Result<(), Failure> {
    check(Command::new("gzip").args(["-9n", "--force"]).arg(file))
}

fn copyright(package: &Package) -> Result<String, Failure> {
    let mut text = format!(
        "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\
         Upstream-Name: nvme-gpu\n\nFiles: *\nCopyright: 2026 The nvme-gpu authors\n{}",
        package.license
    );
    if package.license == BOTH {
        let license = files::read(&root().join("LICENSE-MIT"))?;
        for line in license.lines().skip(2) {
            text += &format!(" {}\n", if line.is_empty() { "." } else { line });
        }
    }
    Ok(text)
}

fn changelog(release: &Release, maker: &str) -> Result<String, Failure> {
    let mut date = Command::new("date");
    date.args(["--utc", "--rfc-email"]).env("LC_ALL", "C");
    let date = output(date.arg(format!("--date=@{}", release.time)))?;
    Ok(format!(
        "nvme-gpu ({VERSION}-{REVISION}) unstable; urgency=medium\n\n  \
         * Version {VERSION}.\n\n -- {maker}  {}\n",
        date.trim()
    ))
}

#[cfg(test)]
mod tests {
    use super::{RULE, file_name, folded};
    use chores::process::root;

    #[test]
    fn files_of_packages_are_named_as_debian_does() {
        let name = file_name("nvme-gpu", "arm64");
        assert!(name.starts_with("nvme-gpu_0."), "{name}");
        assert!(name.ends_with("-1_arm64.deb"), "{name}");
    }

    #[test]
    fn descriptions_have_short_lines_after_a_space() {
        let text = folded(&format!("what it is\n{}", "word ".repeat(40)));
        let mut lines = text.lines();
        assert_eq!(lines.next(), Some("what it is"));
        let rest: Vec<&str> = lines.collect();
        assert_eq!(rest.len(), 3, "{text}");
        assert!(
            rest.iter()
                .all(|line| line.starts_with(" word") && line.len() < 80)
        );
    }

    #[test]
    fn the_rule_is_that_of_the_module() {
        assert!(root().join("kmod").join(RULE).is_file());
    }
}
