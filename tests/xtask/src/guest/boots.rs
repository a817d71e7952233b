//! The table of boots: which devices, and which tests run with them.

/// One boot of the guest.
pub struct Boot {
    pub name: &'static str,
    /// Part of `cargo xtask guest` without a name, and of CI.
    pub always: bool,
    /// Disk images to create (sparse): name in the boot's folder, MiB.
    pub images: &'static [(&'static str, u64)],
    /// Words of QEMU's command line; `{dir}` is the boot's folder.
    pub devices: &'static [&'static str],
    /// What `nvme-gpu serve --device` gets, one for each controller of ours; `{dir}` is the boot's folder.
    pub servers: &'static [&'static str],
    /// Shell variables for the tests.
    pub variables: &'static str,
    pub iommu: bool,
    /// A test reboots the guest.
    pub reboots: bool,
    pub cpus: u32,
    pub memory_mib: u32,
    pub deadline_s: u64,
    /// QEMU's own controllers must not have seen undefined behaviour of the driver (`pci_nvme_ub*`).
    pub defined: bool,
    /// What must be in an image afterwards: its name, a byte offset, text.
    pub left_behind: &'static [(&'static str, u64, &'static str)],
    /// Files of tests/guest/scripts, without their ending, in order.
    pub tests: &'static [&'static str],
}

/// What a boot is unless it says otherwise.
const PLAIN: Boot = Boot {
    name: "",
    always: true,
    images: &[],
    devices: &[],
    servers: &[],
    variables: "",
    iommu: false,
    reboots: false,
    cpus: 2,
    memory_mib: 1024,
    deadline_s: 90,
    defined: true,
    left_behind: &[],
    tests: &[],
};

/// QEMU's own controller with serial number S0.
const ONE_DISK: &[&str] = &[
    "-drive file={dir}/d0.img,if=none,id=d0,format=raw,cache=unsafe",
    "-device nvme,id=c0,serial=S0,drive=d0",
];

/// QEMU's own controller at a fixed address, with transfers up to a full PRP list page.
const PLAIN_VFIO: &[&str] = &[
    "-drive file={dir}/d0.img,if=none,id=d0,format=raw,cache=unsafe",
    "-device nvme,id=c0,serial=S0,drive=d0,addr=0x10,mdts=9",
];

/// Our controller with serial number S0 and a volatile write cache.
const OUR_DISK: &[&str] = &["sim:{dir}/d0.img?serial=S0&wc=on"];

pub const BOOTS: &[Boot] = &[
    // Linux's driver on our controller.
    Boot {
        name: "linux-basic",
        images: &[("d0.img", 256)],
        servers: OUR_DISK,
        variables: "SERIAL=S0",
        reboots: true,
        tests: &["linux-reboot", "linux-admin", "linux-files"],
        ..PLAIN
    },
    Boot {
        name: "linux-io",
        images: &[("d0.img", 256)],
        servers: OUR_DISK,
        variables: "SERIAL=S0",
        tests: &["linux-fio", "linux-reset"],
        ..PLAIN
    },
    Boot {
        name: "linux-life",
        images: &[("d0.img", 256)],
        servers: OUR_DISK,
        variables: "SERIAL=S0",
        cpus: 4,
        left_behind: &[("d0.img", 200 * 4096, "LAST\n")],
        tests: &["linux-queues", "linux-reload", "linux-last-write"],
        ..PLAIN
    },
    // Our driver on QEMU's controllers, behind the kernel's VFIO and the IOMMU.
    Boot {
        name: "vfio-plain",
        images: &[("d0.img", 1024)],
        devices: PLAIN_VFIO,
        variables: "SERIAL=S0 BDF=0000:00:10.0",
        iommu: true,
        tests: &["vfio-cli", "vfio-transfers", "vfio-queues"],
        ..PLAIN
    },
    Boot {
        name: "vfio-data",
        images: &[("d0.img", 1024)],
        devices: PLAIN_VFIO,
        variables: "SERIAL=S0 BDF=0000:00:10.0",
        iommu: true,
        tests: &["vfio-gib", "vfio-kill"],
        ..PLAIN
    },
    // The same on QEMU's controller: whether a test or our controller is wrong.
    Boot {
        name: "linux-reference",
        always: false,
        images: &[("d0.img", 256)],
        devices: ONE_DISK,
        variables: "SERIAL=S0",
        reboots: true,
        cpus: 4,
        deadline_s: 240,
        left_behind: &[("d0.img", 200 * 4096, "LAST\n")],
        tests: &[
            "linux-reboot",
            "linux-admin",
            "linux-files",
            "linux-fio",
            "linux-reset",
            "linux-queues",
            "linux-reload",
            "linux-last-write",
        ],
        ..PLAIN
    },
];
