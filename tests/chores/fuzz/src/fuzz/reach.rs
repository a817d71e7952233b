//! The coverage of the targets' corpora: lines that they reach in the files that each target is
//! for.

use chores::process::{Failure, check, root, target_dir};
use chores_coverage::coverage::{Lines, instrumented, llvm, ranges};
use std::process::Command;

/// The files that a target is for.
const FILES: [(&str, &[&str]); 23] = [
    ("prp_round_trip", &["nvme-core/src/prp.rs"]),
    (
        "sgl_round_trip",
        &["nvme-core/src/sgl.rs", "sim/src/command/sgl.rs"],
    ),
    (
        "cqe_stream",
        &[
            "nvme-core/src/queue_pair.rs",
            "nvme-core/src/inflight.rs",
            "nvme-core/src/cq.rs",
            "nvme-core/src/sq.rs",
        ],
    ),
    (
        "hostile_controller",
        &[
            "nvme-core/src/bringup.rs",
            "nvme-core/src/bringup/plan.rs",
            "nvme-core/src/bringup/script.rs",
            "nvme-core/src/recovery.rs",
            "nvme-core/src/shutdown.rs",
            "nvme-core/src/queue_pair.rs",
            "nvme-core/src/inflight.rs",
        ],
    ),
    (
        "hostile_driver",
        &[
            "sim/src/command/admin.rs",
            "sim/src/command/create.rs",
            "sim/src/device.rs",
            "sim/src/device/features.rs",
            "sim/src/device/logs.rs",
            "sim/src/engine/lifecycle.rs",
            "sim/src/engine/properties.rs",
            "sim/src/bus/doorbell.rs",
            "sim/src/command/features.rs",
            "sim/src/command/identify.rs",
            "sim/src/command/logs.rs",
            "sim/src/bus/queue.rs",
        ],
    ),
    (
        "guest_memory",
        &[
            "sim/src/engine/batch.rs",
            "sim/src/command/data.rs",
            "sim/src/bus/interrupt.rs",
            "sim/src/memory/host.rs",
            "sim/src/command/nvm.rs",
            "sim/src/command/prp.rs",
        ],
    ),
    (
        "identify_log_pages",
        &[
            "nvme-core/spec/src/feature.rs",
            "nvme-core/spec/src/identify.rs",
            "nvme-core/spec/src/identify/controller.rs",
            "nvme-core/spec/src/identify/namespace.rs",
            "nvme-core/spec/src/log_page.rs",
            "nvme-core/spec/src/status.rs",
        ],
    ),
    (
        "device_string",
        &[
            "sim/src/config/options.rs",
            "sim/src/config/options/faults.rs",
            "sim/units/src/lib.rs",
            "host-shell/driver/src/sysfs/address.rs",
        ],
    ),
    (
        "vfio_user_message",
        &[
            "sim/src/vfio_user/channel.rs",
            "sim/src/vfio_user/config_space.rs",
            "sim/src/vfio_user/dma.rs",
            "sim/src/vfio_user/function.rs",
            "sim/src/vfio_user/irq.rs",
            "sim/src/vfio_user/requests.rs",
            "sim/src/vfio_user/server.rs",
            "sim/src/vfio_user/session.rs",
            "sim/vfio-user/src/lib.rs",
        ],
    ),
    (
        "vfio_answers",
        &[
            "host-shell/driver/src/pci.rs",
            "host-shell/driver/src/device/vfio/info.rs",
        ],
    ),
    (
        "shared_queue",
        &[
            "nvme-core/src/shared_queue.rs",
            "nvme-core/src/shared_queue/drain.rs",
            "nvme-core/src/shared_queue/ring.rs",
            "nvme-core/src/shared_queue/wait.rs",
            "nvme-core/src/queue_state.rs",
            "nvme-core/src/queue_state/ended.rs",
        ],
    ),
    (
        "collective",
        &[
            "nvme-core/src/collective.rs",
            "nvme-core/src/collective/reap.rs",
            "nvme-core/src/queue_state.rs",
            "nvme-core/src/queue_state/ended.rs",
        ],
    ),
    (
        "registers",
        &[
            "sim/src/bus/registers.rs",
            "sim/src/engine/lifecycle.rs",
            "sim/src/engine/properties.rs",
            "nvme-core/src/bringup.rs",
            "nvme-core/src/bringup/plan.rs",
            "nvme-core/src/shutdown.rs",
        ],
    ),
    (
        "catalog",
        &[
            "host-shell/files/src/catalog/npy.rs",
            "host-shell/files/src/catalog/safetensors.rs",
        ],
    ),
    (
        "ext4",
        &[
            "host-shell/ext4/src/directory.rs",
            "host-shell/ext4/src/extents.rs",
            "host-shell/ext4/src/group.rs",
            "host-shell/ext4/src/inline.rs",
            "host-shell/ext4/src/inode.rs",
            "host-shell/ext4/src/superblock.rs",
            "host-shell/ext4/src/volume.rs",
        ],
    ),
    ("gpt", &["host-shell/files/src/files/gpt.rs"]),
    ("manifest", &["host-shell/files/src/manifest/text.rs"]),
    ("gguf", &["host-shell/files/src/catalog/gguf.rs"]),
    (
        "rows",
        &[
            "host-shell/store/src/table.rs",
            "host-shell/store/src/scatter.rs",
            "host-shell/store/src/wide.rs",
            "host-shell/store/src/space.rs",
        ],
    ),
    (
        "search_index",
        &[
            "host-shell/search/src/header.rs",
            "nvme-gpu-kernel/compute/src/search/walk.rs",
        ],
    ),
    ("kv_messages", &["host-shell/kv-server/src/message.rs"]),
    (
        "kv_pages",
        &[
            "host-shell/kv/src/area.rs",
            "host-shell/kv/src/format/checkpoint.rs",
            "host-shell/kv/src/format/log.rs",
            "host-shell/kv/src/format/page.rs",
            "host-shell/kv/src/format/superblock.rs",
            "host-shell/kv/src/journal.rs",
            "host-shell/kv/src/recovery.rs",
        ],
    ),
    (
        "trace_decoder",
        &["nvme-core/src/trace.rs", "host-shell/cuda/src/trace.rs"],
    ),
];

/// Runs the seeds, and what fuzzing has kept under target/fuzz-corpus, over an instrumented build.
pub fn report(targets: &[String]) -> Result<(), Failure> {
    let llvm = llvm()?;
    let built = target_dir().join("coverage");
    check(instrumented(&built).args([
        "build",
        "--package",
        "nvme-tests",
        "--example",
        "fuzz_replay",
    ]))?;
    let program = built.join("debug/examples/fuzz_replay");
    for target in targets {
        let raw = built.join(format!("{target}.profraw"));
        let mut replay = Command::new(&program);
        replay.env("LLVM_PROFILE_FILE", &raw).arg(target);
        replay.arg(root().join("fuzz/corpus").join(target));
        let found = root().join("target/fuzz-corpus").join(target);
        if found.is_dir() {
            replay.arg(found);
        }
        check(&mut replay)?;
        let lines = Lines::of(&llvm.lcov(&[raw], std::slice::from_ref(&program))?);
        let files = FILES.iter().find(|(name, _)| name == target);
        let Some((_, files)) = files else {
            return Err(Failure::new(format!(
                "{target}: name the files that it is for in tests/chores/fuzz/src/fuzz/reach.rs"
            )));
        };
        println!("\n{target}");
        for file in *files {
            let Some(found) = lines.of_file(file) else {
                println!("  {file}: not in the build");
                continue;
            };
            let missed = found.missed();
            let reached = found.total() - missed.len();
            let share = 100.0 * reached as f64 / found.total().max(1) as f64;
            println!(
                "  {file}: {reached} of {} lines, {share:.1} %; not {}",
                found.total(),
                ranges(&missed)
            );
        }
    }
    Ok(())
}
