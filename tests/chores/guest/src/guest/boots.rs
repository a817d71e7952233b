//! The table of boots: the devices of each boot, and the tests that run with them.

use super::dmar::Dmar;

/// One boot of the guest.
#[derive(Clone, Copy)]
pub struct Boot {
    pub name: &'static str,
    /// Part of `cargo xtask guest` without a name, and of CI.
    pub always: bool,
    /// Disk images (sparse) to create: the name in the boot's folder, and the size in MiB.
    pub images: &'static [(&'static str, u64)],
    /// Words of QEMU's command line; `{dir}` is the boot's folder.
    pub devices: &'static [&'static str],
    /// Arguments of `nvme-gpu serve --device`, one for each simulated controller; `{dir}` is the boot's folder.
    pub servers: &'static [&'static str],
    /// Shell variables for the tests.
    pub variables: &'static str,
    /// Words for the guest's kernel.
    pub kernel: &'static str,
    pub iommu: bool,
    /// A kernel with CONFIG_PCI_P2PDMA knows the processor as one whose host bridges pass transactions on to peers.
    pub passes_peers: bool,
    /// A table of the firmware about the IOMMU in the place of QEMU's.
    pub dmar: Option<Dmar>,
    /// A test reboots the guest.
    pub reboots: bool,
    pub cpus: u32,
    pub memory_mib: u32,
    pub deadline_s: u64,
    /// True if QEMU's controllers must not log undefined behaviour of the driver (`pci_nvme_ub*`).
    pub defined: bool,
    /// Namespaces of the boot's only QEMU controller, whose trace the protocol auditor reads. If the list is empty, it
    /// reads no trace.
    pub audit: &'static [u32],
    /// Rules that the tests break on purpose, by the names that the protocol auditor of the simulated controllers
    /// prints.
    pub breaks: &'static [&'static str],
    /// The last test leaves the boot's one controller of QEMU's running: the kernel's end has to shut it down.
    pub leaves_running: bool,
    /// Content that an image must have afterwards: the image's name, a byte offset, and the text there.
    pub left_behind: &'static [(&'static str, u64, &'static str)],
    /// Files of tests/guest/scripts, without their ending, in order.
    pub tests: &'static [&'static str],
}

/// Default values of a boot.
const PLAIN: Boot = Boot {
    name: "",
    always: true,
    images: &[],
    devices: &[],
    servers: &[],
    variables: "",
    kernel: "",
    iommu: false,
    passes_peers: true,
    dmar: None,
    reboots: false,
    cpus: 2,
    memory_mib: 1024,
    deadline_s: 600,
    defined: true,
    audit: &[],
    breaks: &[],
    leaves_running: false,
    left_behind: &[],
    tests: &[],
};

/// QEMU's controller with serial number S0.
const ONE_DISK: &[&str] = &[
    "-drive file={dir}/d0.img,if=none,id=d0,format=raw,cache=unsafe",
    "-device nvme,id=c0,serial=S0,drive=d0",
];

/// QEMU's own controller at a fixed address, with transfers up to a full PRP list page.
const PLAIN_VFIO: &[&str] = &[
    "-drive file={dir}/d0.img,if=none,id=d0,format=raw,cache=unsafe",
    "-device nvme,id=c0,serial=S0,drive=d0,addr=0x10,mdts=9",
];

/// The controller of `PLAIN_VFIO` beside a function whose BAR 2 replaces the memory of a GPU.
const PEER_BESIDE: &[&str] = &[
    "-drive file={dir}/d0.img,if=none,id=d0,format=raw,cache=unsafe",
    "-device nvme,id=c0,serial=S0,drive=d0,addr=0x10,mdts=9",
    "-object memory-backend-file,id=shm,share=on,mem-path={dir}/shm,size=16M",
    "-device ivshmem-plain,memdev=shm,addr=0x18",
];

/// Our controller with serial number S0 and a volatile write cache.
const OUR_DISK: &[&str] = &["sim:{dir}/d0.img?serial=S0&wc=on"];

pub const BOOTS: &[Boot] = &[
    // Linux's driver on our controller.
    Boot {
        name: "linux-plain",
        images: &[("d0.img", 256)],
        servers: OUR_DISK,
        variables: "SERIAL=S0",
        reboots: true,
        cpus: 4,
        left_behind: &[("d0.img", 200 * 4096, "LAST\n")],
        tests: &[
            "linux-reboot",
            "linux-admin",
            "linux-files",
            "linux-extents",
            "linux-fio",
            "linux-reset",
            "linux-queues",
            "linux-reload",
            "linux-last-write",
        ],
        ..PLAIN
    },
    Boot {
        name: "linux-features",
        images: &[("d0.img", 64)],
        servers: &["sim:{dir}/d0.img?serial=S0&wc=on&hmpre=4096&hmmin=1024"],
        variables: "SERIAL=S0",
        // One test reads past the end, to see that the controller refuses it.
        breaks: &["LbaRange"],
        tests: &["linux-features"],
        ..PLAIN
    },
    Boot {
        name: "linux-intx",
        images: &[("d0.img", 256)],
        servers: OUR_DISK,
        variables: "SERIAL=S0",
        kernel: "pci=nomsi",
        tests: &["linux-fio"],
        ..PLAIN
    },
    // Our driver on QEMU's controllers, behind the kernel's VFIO and the IOMMU.
    Boot {
        name: "vfio-plain",
        images: &[("d0.img", 1024)],
        devices: PLAIN_VFIO,
        variables: "SERIAL=S0 BDF=0000:00:10.0",
        iommu: true,
        audit: &[1],
        tests: &[
            "driver-cli",
            "driver-transfers",
            "driver-queues",
            "driver-gathers",
        ],
        ..PLAIN
    },
    Boot {
        name: "vfio-edges",
        images: &[("d0.img", 1024), ("faulty.img", 64), ("shm", 16)],
        devices: &[
            "-drive file={dir}/d0.img,if=none,id=d0,format=raw,cache=unsafe",
            "-device nvme,id=c0,serial=S0,drive=d0,addr=0x10,mdts=9",
            // The faults must lie under a raw node, or they never come.
            "-blockdev driver=file,filename={dir}/faulty.img,node-name=f0",
            "-blockdev {\"driver\":\"raw\",\"node-name\":\"f2\",\"file\":{\"driver\":\"blkdebug\",\"node-name\":\"f1\",\"image\":\"f0\",\
             \"inject-error\":[{\"event\":\"read_aio\",\"iotype\":\"read\",\"errno\":5,\"sector\":2048,\"once\":false},\
             {\"event\":\"write_aio\",\"iotype\":\"write\",\"errno\":5,\"sector\":4096,\"once\":false}]}}",
            "-device nvme,id=faulty,serial=FAULTY,drive=f2,addr=0x11",
            "-object memory-backend-file,id=shm,share=on,mem-path={dir}/shm,size=16M",
            "-device ivshmem-plain,memdev=shm,addr=0x18",
        ],
        variables: "SERIAL=S0 BDF=0000:00:10.0 FAULTY=0000:00:11.0 PEER=0000:00:18.0",
        iommu: true,
        left_behind: &[("shm", 0, "from the disk")],
        tests: &[
            "vfio-errors",
            "driver-confine",
            "vfio-relay",
            "vfio-irq",
            "vfio-p2p",
            "vfio-owner",
            "vfio-refuse",
            "vfio-gib",
            "driver-kill",
        ],
        ..PLAIN
    },
    Boot {
        name: "vfio-trouble",
        images: &[("d0.img", 256), ("leaving.img", 64)],
        devices: &[
            "-drive file={dir}/d0.img,if=none,id=d0,format=raw,cache=unsafe",
            "-device nvme,id=c0,serial=S0,drive=d0,addr=0x10",
            "-device pcie-root-port,id=rp0,chassis=1,slot=1,addr=0x12",
            "-drive file={dir}/leaving.img,if=none,id=l0,format=raw,cache=unsafe",
            "-device nvme,id=leaving,serial=LEAVING,drive=l0,bus=rp0",
        ],
        variables: "SERIAL=S0 BDF=0000:00:10.0 LEAVING=0000:01:00.0",
        iommu: true,
        // The test rings doorbells of queues that a reset has deleted, to see that nothing happens.
        defined: false,
        tests: &["driver-reset", "driver-contract", "vfio-unplug"],
        ..PLAIN
    },
    Boot {
        name: "vfio-shapes",
        images: &[
            ("n1.img", 64),
            ("n2.img", 64),
            ("n3.img", 64),
            ("wide.img", 256),
            ("pmr.img", 16),
            ("zoned.img", 64),
            ("beside.img", 64),
            ("tiny.img", 64),
            ("d0.img", 64),
            ("d1.img", 64),
            ("d2.img", 64),
        ],
        devices: &[
            "-device nvme-subsys,id=ss0,nqn=subsys0",
            "-device nvme,id=c0,serial=S0,subsys=ss0,mdts=3,max_ioqpairs=2,msix_qsize=3,addr=0x10",
            "-device nvme,id=c1,serial=S0,subsys=ss0,addr=0x11",
            "-drive file={dir}/n1.img,if=none,id=n1,format=raw,cache=unsafe",
            "-device nvme-ns,drive=n1,bus=c0,nsid=1,shared=on",
            "-drive file={dir}/n2.img,if=none,id=n2,format=raw,cache=unsafe",
            "-device nvme-ns,drive=n2,bus=c0,nsid=2,logical_block_size=4096,physical_block_size=4096,ms=8,mset=0,pi=1,pil=0",
            "-drive file={dir}/n3.img,if=none,id=n3,format=raw,cache=unsafe",
            "-device nvme-ns,drive=n3,bus=c0,nsid=3,ms=64,mset=1,pi=1,pif=2",
            "-object memory-backend-file,id=pmr,share=on,mem-path={dir}/pmr.img,size=16M",
            "-drive file={dir}/wide.img,if=none,id=w0,format=raw,cache=unsafe",
            "-device nvme,id=c2,serial=S2,drive=w0,cmb_size_mb=16,pmrdev=pmr,mdts=9,addr=0x12,\
             logical_block_size=4096,physical_block_size=4096",
            "-device nvme,id=c3,serial=S3,addr=0x13",
            "-drive file={dir}/zoned.img,if=none,id=z0,format=raw,cache=unsafe",
            "-device nvme-ns,drive=z0,bus=c3,nsid=1,zoned=on,zoned.zone_size=4M,zoned.zone_capacity=3M,\
             zoned.max_open=4,zoned.max_active=6",
            "-drive file={dir}/beside.img,if=none,id=b0,format=raw,cache=unsafe",
            "-device nvme-ns,drive=b0,bus=c3,nsid=2",
            "-drive file={dir}/tiny.img,if=none,id=t0,format=raw,cache=unsafe",
            "-device nvme,id=c4,serial=S4,drive=t0,mdts=1,max_ioqpairs=1,msix_qsize=1,mqes=1,addr=0x14",
            "-drive file={dir}/d0.img,if=none,id=d0,format=raw,cache=unsafe",
            "-device nvme,id=c5,serial=S5,drive=d0,addr=0x15",
            "-drive file={dir}/d1.img,if=none,id=d1,format=raw,cache=unsafe",
            "-device nvme,id=c6,serial=S6,drive=d1,cmb_size_mb=16,legacy-cmb=on,addr=0x16",
            "-drive file={dir}/d2.img,if=none,id=d2,format=raw,cache=unsafe",
            "-device nvme,id=c7,serial=S7,drive=d2,cmb_size_mb=16,addr=0x17",
        ],
        variables: "SHAPES='0000:00:10.0 0000:00:11.0 0000:00:12.0 0000:00:13.0 0000:00:14.0' BDF=0000:00:15.0 \
                    CMBS='0000:00:16.0 0000:00:17.0'",
        iommu: true,
        tests: &["vfio-shapes", "vfio-cmb"],
        ..PLAIN
    },
    // The possible users of a drive: each test has a real one, and `bind` must name it. Linux drives one controller
    // of a subsystem and the tests the other one, over the same namespace.
    Boot {
        name: "holders",
        images: &[("d0.img", 64), ("d1.img", 128)],
        devices: &[
            "-drive file={dir}/d0.img,if=none,id=d0,format=raw,cache=unsafe",
            "-device nvme,id=c0,serial=S0,drive=d0,addr=0x10",
            "-device nvme-subsys,id=ss0,nqn=subsys0",
            "-device nvme,id=c1,serial=S1,subsys=ss0,addr=0x11",
            "-device nvme,id=c2,serial=S1,subsys=ss0,addr=0x12",
            "-drive file={dir}/d1.img,if=none,id=d1,format=raw,cache=unsafe",
            "-device nvme-ns,drive=d1,bus=c1,nsid=1,shared=on",
            "-device pcie-root-port,id=rp0,chassis=1,slot=1,addr=0x13",
            "-device nvme-subsys,id=ss1,nqn=subsys1",
            "-device nvme,id=c3,serial=S3,bus=rp0,subsys=ss1,sriov_max_vfs=1,sriov_vq_flexible=2,sriov_vi_flexible=1",
        ],
        variables: "SERIAL=S0 BDF=0000:00:10.0 FIRST=0000:00:11.0 SECOND=0000:00:12.0 PARENT=0000:01:00.0",
        iommu: true,
        tests: &[
            "vfio-beside",
            "bind-siblings",
            "bind-holders",
            "bind-virtual",
        ],
        ..PLAIN
    },
    // Our driver on QEMU's controller, behind the module nvme_gpu and the IOMMU.
    Boot {
        name: "kmod-plain",
        images: &[("d0.img", 1024)],
        devices: PLAIN_VFIO,
        variables: "SERIAL=S0 BDF=0000:00:10.0 LENDER=nvme_gpu DEVICE=kmod:0000:00:10.0",
        iommu: true,
        audit: &[1],
        tests: &[
            "driver-cli",
            "driver-transfers",
            "kmod-udmabuf",
            "kmod-calls",
            "driver-gathers",
        ],
        ..PLAIN
    },
    Boot {
        name: "kmod-edges",
        images: &[("d0.img", 64), ("d1.img", 64), ("d2.img", 64)],
        devices: &[
            "-drive file={dir}/d0.img,if=none,id=d0,format=raw,cache=unsafe",
            "-device nvme,id=c0,serial=S0,drive=d0,addr=0x10,mdts=9",
            // A drive behind a port whose link comes up again after a reset. QEMU's faster ports do not report that
            // it has.
            "-device pcie-root-port,id=rp0,chassis=1,slot=1,addr=0x12,x-speed=2_5",
            "-drive file={dir}/d1.img,if=none,id=d1,format=raw,cache=unsafe",
            "-device nvme,id=c1,serial=S1,drive=d1,bus=rp0",
            // A drive with a function beside it that has no driver, behind a faster port: this one does not recover.
            "-device pcie-root-port,id=rp1,chassis=2,slot=2,addr=0x13",
            "-drive file={dir}/d2.img,if=none,id=d2,format=raw,cache=unsafe",
            "-device edu,bus=rp1,addr=0x0.1",
            "-device nvme,id=c2,serial=S2,drive=d2,bus=rp1,addr=0x0.0,multifunction=on",
        ],
        variables: "SERIAL=S0 BDF=0000:00:10.0 BEHIND=0000:01:00.0 LOST=0000:02:00.0 BESIDE=0000:02:00.1 LENDER=nvme_gpu \
                    DEVICE=kmod:0000:00:10.0",
        // The log must have room for the kernel's messages each time that memory has run out.
        kernel: "log_buf_len=4M",
        iommu: true,
        deadline_s: 1200,
        // Calls reset the function under the tests' own commands.
        defined: false,
        tests: &[
            "kmod-edges",
            "kmod-partial",
            "kmod-errors",
            "driver-reset",
            "driver-confine",
            "driver-kill",
        ],
        ..PLAIN
    },
    // The same beside a function whose BAR 2 stands for the memory of a GPU.
    Boot {
        name: "kmod-peer",
        images: &[("d0.img", 64), ("shm", 16)],
        devices: PEER_BESIDE,
        variables: "SERIAL=S0 BDF=0000:00:10.0 PEER=0000:00:18.0 LENDER=nvme_gpu DEVICE=kmod:0000:00:10.0",
        iommu: true,
        // Doorbells of queues that a reset took away are rung.
        defined: false,
        tests: &[
            "kmod-exporter",
            "kmod-rings",
            "driver-contract",
            "driver-gathers-reset",
        ],
        ..PLAIN
    },
    // The same boot with a kernel that does not know that host bridges pass transactions on. It needs `--kernel
    // FOLDER`: CONFIG_PCI_P2PDMA is off in Debian's kernels.
    Boot {
        name: "kmod-far",
        always: false,
        images: &[("d0.img", 64), ("shm", 16)],
        devices: PEER_BESIDE,
        variables: "SERIAL=S0 BDF=0000:00:10.0 PEER=0000:00:18.0 LENDER=nvme_gpu DEVICE=kmod:0000:00:10.0",
        iommu: true,
        passes_peers: false,
        tests: &["kmod-far"],
        ..PLAIN
    },
    // The functions: one that no IOMMU translates for, one whose interrupts are not isolated, one for which firmware
    // reserves memory. The kernel is locked down.
    Boot {
        name: "kmod-bare",
        images: &[("d0.img", 64), ("d1.img", 64), ("d2.img", 64)],
        devices: &[
            "-device pxb-pcie,id=bare,bus_nr=0x80,bypass_iommu=on",
            "-device pcie-root-port,id=rp0,chassis=1,slot=1,bus=bare",
            "-drive file={dir}/d0.img,if=none,id=d0,format=raw,cache=unsafe",
            "-device nvme,id=c0,serial=S0,drive=d0,bus=rp0",
            "-drive file={dir}/d1.img,if=none,id=d1,format=raw,cache=unsafe",
            "-device nvme,id=c1,serial=S1,drive=d1,bus=pcie.0,addr=0x10",
            "-drive file={dir}/d2.img,if=none,id=d2,format=raw,cache=unsafe",
            "-device nvme,id=c2,serial=S2,drive=d2,bus=pcie.0,addr=0x11",
        ],
        variables: "SERIAL=S0 BDF=0000:81:00.0 SHARED=0000:00:10.0 RESERVED=0000:00:11.0 LENDER=nvme_gpu \
                    DEVICE=kmod:0000:81:00.0",
        kernel: "intremap=off",
        iommu: true,
        dmar: Some(Dmar {
            translated: &[0x10, 0x11],
            own_memory: 0x11,
        }),
        tests: &["kmod-bare"],
        ..PLAIN
    },
    // Two functions share one IOMMU group, and a third shares the interrupt line of the first. No function is
    // translated for alone.
    Boot {
        name: "kmod-group",
        images: &[("d0.img", 64), ("d1.img", 64), ("d2.img", 64)],
        devices: &[
            "-drive file={dir}/d0.img,if=none,id=d0,format=raw,cache=unsafe",
            "-device nvme,id=c0,serial=S0,drive=d0,addr=0x10.0,multifunction=on",
            "-drive file={dir}/d1.img,if=none,id=d1,format=raw,cache=unsafe",
            "-device nvme,id=c1,serial=S1,drive=d1,addr=0x10.1",
            "-drive file={dir}/d2.img,if=none,id=d2,format=raw,cache=unsafe",
            "-device nvme,id=c2,serial=S2,drive=d2,addr=0x14",
        ],
        variables: "SERIAL=S2 BDF=0000:00:14.0 FIRST=0000:00:10.0 SECOND=0000:00:10.1 LENDER=nvme_gpu \
                    DEVICE=kmod:0000:00:14.0",
        kernel: "iommu=pt",
        iommu: true,
        // The head of a completion queue is left out on purpose.
        tests: &["kmod-group", "kmod-line", "driver-confine"],
        ..PLAIN
    },
    // A kernel that preempts itself, with more processors than one test uses.
    Boot {
        name: "kmod-races",
        images: &[("d0.img", 64)],
        devices: PLAIN_VFIO,
        variables: "SERIAL=S0 BDF=0000:00:10.0 LENDER=nvme_gpu DEVICE=kmod:0000:00:10.0",
        kernel: "preempt=full suspend.pm_test_delay=1",
        iommu: true,
        cpus: 4,
        deadline_s: 1200,
        defined: false,
        leaves_running: true,
        tests: &["kmod-races", "kmod-stops", "kmod-fuzz", "kmod-left"],
        ..PLAIN
    },
    // A quarter of an hour of calls, on a kernel that looks at memory that was freed; not in CI.
    Boot {
        name: "kmod-long",
        always: false,
        images: &[("d0.img", 64)],
        devices: PLAIN_VFIO,
        variables: "SERIAL=S0 BDF=0000:00:10.0 LENDER=nvme_gpu DEVICE=kmod:0000:00:10.0 FUZZ_SECONDS=900",
        kernel: "preempt=full slab_debug=FZPU page_poison=1 kfence.sample_interval=10",
        iommu: true,
        cpus: 4,
        deadline_s: 1200,
        tests: &["kmod-fuzz"],
        ..PLAIN
    },
    // Both ends are this workspace's, with the kernel's VFIO and IOMMU between them. There is no limit on transfers,
    // which QEMU's controller does not offer, so that PRP lists are chained.
    Boot {
        name: "vfio-ours",
        images: &[("d0.img", 256)],
        servers: &["sim:{dir}/d0.img?serial=S0&wc=on&mdts=0&mqes=256"],
        variables: "SERIAL=S0 BDF=0000:00:10.0",
        iommu: true,
        tests: &["driver-transfers", "driver-reset"],
        ..PLAIN
    },
    // A boot with iommufd, which Debian's kernels lack: it needs `--kernel FOLDER`.
    Boot {
        name: "vfio-iommufd",
        always: false,
        images: &[("d0.img", 1024), ("shm", 16)],
        devices: PEER_BESIDE,
        variables: "SERIAL=S0 BDF=0000:00:10.0 PEER=0000:00:18.0 DEVICE=vfio:0000:00:10.0?iommu=iommufd",
        iommu: true,
        // Doorbells of queues that a reset took away are rung.
        defined: false,
        left_behind: &[("shm", 8 << 20, "from the disk")],
        tests: &[
            "vfio-iommufd",
            "driver-cli",
            "driver-transfers",
            "driver-queues",
            "driver-confine",
            "driver-reset",
            "driver-contract",
            "driver-kill",
        ],
        ..PLAIN
    },
    // Fifteen minutes; not in CI.
    Boot {
        name: "vfio-long",
        always: false,
        images: &[("d0.img", 256)],
        devices: PLAIN_VFIO,
        variables: "BDF=0000:00:10.0 SECONDS_LONG=900",
        iommu: true,
        deadline_s: 1800,
        tests: &["vfio-long"],
        ..PLAIN
    },
    // The same tests on QEMU's controller, which show whether a test or the simulated controller is wrong.
    Boot {
        name: "linux-reference",
        always: false,
        images: &[("d0.img", 256)],
        devices: ONE_DISK,
        variables: "SERIAL=S0",
        reboots: true,
        cpus: 4,
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
