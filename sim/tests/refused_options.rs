//! Options of a device's text that are refused: the option to blame, and why.
#![cfg(feature = "std")]

use nvme_sim::config::parse;

fn refusal(text: &str) -> (String, String) {
    let error = parse(text)
        .err()
        .unwrap_or_else(|| panic!("{text} is fine"));
    let told = error.to_string();
    assert_eq!(told, format!("{}: {}", error.option, error.why), "one line");
    assert!(!told.contains('\n'));
    (error.option, error.why)
}

#[test]
fn the_option_to_blame_is_named_with_its_range() {
    for (text, option, why) in [
        ("", "device", "give a path"),
        ("?size=1MiB", "device", "give a path"),
        ("mem?size", "size", "name=value"),
        ("mem?size=1EB", "size", ""),
        ("mem?size=16777215TiB", "size", "not that much memory"),
        ("mem?ns=0", "ns", "1 to 256"),
        ("mem?ns=257", "ns", "1 to 256"),
        ("mem?cache=5GiB", "cache", "at most 4GiB"),
        ("mem?fault=0", "fault", ""),
        ("mem?fault=status:0", "fault", "1 to 0x7fff"),
        ("mem?fault=status:0x8000", "fault", "1 to 0x7fff"),
        ("mem?what=1", "what", ""),
        ("mem?wc=off&cache=1MiB", "cache", "no write cache"),
        ("mem?cache=1MiB&wc=off", "cache", "no write cache"),
        ("mem?hmmin=16", "hmmin", "give hmpre="),
        ("mem?seed=7", "seed", "nothing here is random"),
        ("mem?wc=maybe", "wc", ""),
    ] {
        let (named, told) = refusal(text);
        assert_eq!(named, option, "{text}: {told}");
        assert!(told.contains(why) && !told.is_empty(), "{text}: {told}");
    }
}

/// A status fault has a type and a code, and applies to the commands that it names.
#[test]
fn a_status_in_range_is_taken() {
    use nvme_sim::Fault;
    use nvme_spec::{Status, nvm::opcode};
    for (text, status) in [
        ("641", Status::UNRECOVERED_READ_ERROR),
        ("0x281", Status::UNRECOVERED_READ_ERROR),
        ("1", Status::INVALID_OPCODE),
        ("0x7ff", Status(0x7FF)),
        ("0x4281", Status::UNRECOVERED_READ_ERROR.with_dnr()),
        ("0x2000", Status::SUCCESS.with_more()),
    ] {
        let config = parse(&format!("mem?fault=status:{text}@op=read")).expect(text);
        let rule = &config.faults.rules[0];
        assert!(matches!(rule.what, Fault::Status(found) if found == status));
        assert_eq!(rule.when.opcode, Some(opcode::READ));
    }
}

/// A new image has whole blocks; a refused one is not made.
#[test]
fn an_image_that_cannot_be_is_not_made() {
    let path = std::env::temp_dir().join(format!("nvme-sim-{}-odd", std::process::id()));
    let _ = std::fs::remove_file(&path);
    for size in ["0", "4095", "6144", "1000000"] {
        let (option, why) = refusal(&format!("{}?size={size}", path.display()));
        assert_eq!(option, "size");
        assert!(why.contains("multiple of 4096"), "{size}: {why}");
        assert!(!path.exists(), "{size}");
    }
    let missing = refusal(&path.display().to_string());
    assert!(!missing.1.is_empty() && !path.exists());
}

/// Each namespace of a file device has a separate image beside the first.
#[test]
fn namespaces_of_files_have_names_of_their_own() {
    let first = std::env::temp_dir().join(format!("nvme-sim-{}-many", std::process::id()));
    let names = ["", ".2", ".3"].map(|end| format!("{}{end}", first.display()));
    names.iter().for_each(|name| _ = std::fs::remove_file(name));
    let config = parse(&format!("{}?size=64KiB&ns=3", first.display())).unwrap();
    assert_eq!(config.namespaces.len(), 3);
    for (name, namespace) in names.iter().zip(&config.namespaces) {
        let bytes = std::fs::metadata(name).expect(name).len();
        assert_eq!((bytes, namespace.store.bytes()), (65_536, 65_536));
        std::fs::remove_file(name).unwrap();
    }
}

/// Metadata lie in memory: a controller whose metadata do not fit there is refused, and never made without them.
#[test]
fn metadata_that_no_memory_holds_are_refused() {
    use nvme_sim::{Controller, VecMemory};
    for size in ["", "size=4611686018427387904&"] {
        let config = parse(&format!("null?{size}block=512&meta=65535")).unwrap();
        let error = Controller::new(config, VecMemory::new(4096)).err().unwrap();
        assert_eq!(error.option, "meta");
        assert!(error.why.contains("not that much memory"), "{error}");
    }
}

/// Options that go together are taken in any order.
#[test]
fn options_with_an_effect_are_taken() {
    for text in [
        "cache=1MiB&wc=on",
        "hmmin=16&hmpre=32",
        "seed=7&profile=optane",
        "seed=7&latency=1us",
        "seed=7&fault=drop@p=0.5",
    ] {
        assert!(parse(&format!("mem?{text}")).is_ok(), "{text}");
    }
}

/// A block device has no length of a file, so that it is named before its size is asked.
#[test]
fn a_block_device_is_refused_by_name() {
    use std::os::unix::fs::FileTypeExt;
    let devices = std::fs::read_dir("/dev").unwrap().flatten();
    let mut blocks = devices.filter(|one| one.file_type().is_ok_and(|kind| kind.is_block_device()));
    let Some(path) = blocks.find(|one| std::fs::File::open(one.path()).is_ok()) else {
        return;
    };
    let text = format!("{}?ro=on", path.path().display());
    let (_, why) = refusal(&text);
    assert!(why.contains("it is a block device"), "{text}: {why}");
}
