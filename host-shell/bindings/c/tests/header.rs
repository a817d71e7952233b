//! include/nvme_gpu.h is what cbindgen makes of the sources; `UPDATE_HEADER=1` writes it.

use cbindgen::{Builder, Config, DocumentationStyle, ExportConfig, Language, Style};
use std::path::Path;

/// What every reader of the header has to know.
const HEAD: &str = "\
/* nvme_gpu.h: reads and writes of NVMe drives and files, rows of tables by ids, gathers by a GPU.
 *
 * Made from host-shell/bindings/c/src by `UPDATE_HEADER=1 cargo test -p nvme-gpu-capi --test header`, not by hand.
 * Guide: docs/guide/c.md.
 *
 * Errors: functions return 0 or a status: see nvme_gpu_status. nvme_gpu_last_error() and nvme_gpu_last_remedy() say
 * in words what went wrong in this thread and what to do. No function ends the process or throws.
 * Threads: every function may be called by any thread, several at once, also on one handle. A signal handler may
 * call none. After fork() the child may use what it opens itself, and nothing of its parent.
 * Handles: nvme_gpu_t, nvme_gpu_table_t and nvme_gpu_pending_t are numbers that are looked up. One that was closed,
 * and NULL, ends with NVME_GPU_ERROR_CLOSED; closing it again does nothing.
 * Pointers: point to as much memory as the function says, for the time that it says; NULL where nothing else is
 * said is NVME_GPU_ERROR_USAGE. Texts end with a 0. Sizes and offsets are in bytes.
 * Structures: begin with their size, which the caller sets. Fields that a smaller size lacks have their default;
 * of a larger one the fields that the library does not know have to be 0.
 */";

const TAIL: &str = "\
/* nvme_gpu_options options = NVME_GPU_OPTIONS_INIT; */
#define NVME_GPU_OPTIONS_INIT { sizeof(nvme_gpu_options), NVME_GPU_VERSION, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
";

const RENAMED: [(&str, &str); 22] = [
    ("StoreHandle", "nvme_gpu_t"),
    ("TableHandle", "nvme_gpu_table_t"),
    ("PendingHandle", "nvme_gpu_pending_t"),
    ("OpenOptions", "nvme_gpu_options"),
    ("LibraryVersions", "nvme_gpu_versions"),
    ("StoreStatistics", "nvme_gpu_statistics"),
    ("PathInfo", "nvme_gpu_path_info"),
    ("StoreAdvice", "nvme_gpu_advice"),
    ("RowsReport", "nvme_gpu_report"),
    ("TableRequest", "nvme_gpu_row_request"),
    ("TableScales", "nvme_gpu_row_scales"),
    ("BatchIo", "nvme_gpu_io"),
    ("RangeOfStore", "nvme_gpu_range"),
    ("BegunHandle", "nvme_gpu_begun_t"),
    ("DeviceHandle", "nvme_gpu_device_t"),
    ("DeviceSetup", "nvme_gpu_device_setup"),
    ("QueuesByValue", "nvme_gpu_queues"),
    ("RowWords", "nvme_gpu_rows"),
    ("PagesHandle", "nvme_gpu_pages_t"),
    ("PagesOptions", "nvme_gpu_pages_options"),
    ("PageEntry", "nvme_gpu_page"),
    ("PagesStatistics", "nvme_gpu_pages_statistics"),
];

/// The files with functions, in the order of the header.
const FILES: [&str; 17] = [
    "status.rs",
    "version.rs",
    "opened.rs",
    "store.rs",
    "insight.rs",
    "transfer.rs",
    "batch.rs",
    "request.rs",
    "table.rs",
    "scales.rs",
    "pending.rs",
    "notices.rs",
    "halves.rs",
    "device.rs",
    "pages.rs",
    "page_sharing.rs",
    "page_calls.rs",
];

fn made() -> String {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let rename = RENAMED.map(|(rust, c)| (rust.to_owned(), c.to_owned()));
    let config = Config {
        language: Language::C,
        style: Style::Both,
        cpp_compat: true,
        documentation_style: DocumentationStyle::C,
        header: Some(HEAD.to_owned()),
        trailer: Some(TAIL.to_owned()),
        include_guard: Some("NVME_GPU_H".to_owned()),
        line_length: 120,
        usize_is_size_t: true,
        no_includes: true,
        sys_includes: vec!["stddef.h".to_owned(), "stdint.h".to_owned()],
        export: ExportConfig {
            rename: rename.into_iter().collect(),
            exclude: [
                "OperationReport",
                "OpenedStore",
                "OpenTable",
                "OpenDevice",
                "RegisteredRange",
                "OpenGather",
                "OpenedPages",
                "PageCall",
            ]
            .map(str::to_owned)
            .into(),
            ..ExportConfig::default()
        },
        ..Config::default()
    };
    let mut builder = Builder::new().with_config(config);
    for file in FILES {
        builder = builder.with_src(sources.join(file));
    }
    let mut bytes = Vec::new();
    builder.generate().unwrap().write(&mut bytes);
    String::from_utf8(bytes).unwrap()
}

#[test]
fn the_committed_header_is_that_of_the_sources() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/nvme_gpu.h");
    let made = made();
    if std::env::var_os("UPDATE_HEADER").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == made,
        "{} differs: UPDATE_HEADER=1 cargo test -p nvme-gpu-capi --test header",
        path.display()
    );
}

#[test]
fn every_exported_function_is_declared() {
    let header = made();
    for symbol in include_str!("symbols.txt").lines() {
        assert!(
            header.contains(&format!(" {symbol}(")) || header.contains(&format!("*{symbol}(")),
            "{symbol}"
        );
    }
}
