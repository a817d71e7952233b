//! Tests of `options`.

use super::*;
use crate::config::fault::{ExternalChange, Fault};
use crate::medium::latency::LatencyProfile;
use nvme_spec::Status;
use std::path::Path;

fn why(text: &str) -> String {
    parse(text)
        .err()
        .map(|error| error.to_string())
        .unwrap_or_default()
}

#[test]
fn options_become_a_configuration() {
    let text = "mem?size=1MiB&block=512&ns=2&queues=8&mdts=3&mqes=0x100&dstrd=4&profile=optane\
                &wc=off&seed=7&fault=drop@op=read,nth=5&fault=delay:5ms@qid=1,every=3";
    let config = parse(text).unwrap();
    assert_eq!(config.namespaces.len(), 2);
    assert_eq!(config.namespaces[1].store.bytes(), 1 << 20);
    assert_eq!(
        (config.max_queues, config.mdts, config.mqes, config.dstrd),
        (8, 3, 256, 4)
    );
    assert_eq!(config.profile, LatencyProfile::OPTANE);
    assert!(!config.write_cache);
    let rules = &config.faults.rules;
    assert_eq!(
        (rules[0].what, rules[0].when.opcode),
        (Fault::Drop, Some(2))
    );
    assert_eq!(rules[1].what, Fault::Delay(5_000_000));
    assert_eq!(rules[1].when.qid, Some(1));
    let when = |text| parse(text).unwrap().faults.rules[0].when;
    let places = |text| (when(text).nth, when(text).until);
    assert_eq!(places("mem?fault=drop@nth=3-9"), (Some(3), Some(9)));
    assert_eq!(places("mem?fault=drop@nth=4"), (Some(4), Some(4)));
}

#[test]
fn a_latency_is_the_reads_and_leaves_the_rest_of_the_profile() {
    let profile = |text| parse(text).unwrap().profile;
    let only = LatencyProfile {
        read_ns: 20_000,
        ..LatencyProfile::NONE
    };
    assert_eq!(profile("mem?latency=20us"), only);
    let gen5 = profile("mem?latency=35us&profile=nvme-gen5");
    // Half the latency with half as many commands at a time gives the same rate.
    assert_eq!((gen5.read_ns, gen5.parallelism), (35_000, 135));
    assert_eq!(gen5.bytes_per_us, LatencyProfile::NVME_GEN5.bytes_per_us);
    assert_eq!(profile("mem?latency=0ns"), LatencyProfile::NONE);
    assert!(why("mem?latency=20").starts_with("latency: "));
}

#[test]
fn every_option_name_is_known() {
    for OptionRow { name, .. } in OPTIONS {
        assert!(
            !why(&format!("mem?{name}=~")).contains("unknown option"),
            "{name}"
        );
    }
}

#[test]
fn mistakes_are_named_with_their_option() {
    assert!(why("").starts_with("device: "));
    assert!(why("mem?size=12x").starts_with("size: "));
    assert!(why("mem?size=4095").starts_with("size: "));
    assert!(why("mem?block=1000").starts_with("block: "));
    assert!(why("mem?colour=red").starts_with("colour: unknown"));
    assert!(why("mem?queues").contains("name=value"));
    assert!(why("null?fault=explode").contains("explode"));
    assert!(why("null?fault=status:0").contains("0x7fff"));
    assert!(why("mem?size=99999999TiB").starts_with("size: "));
    assert!(why("/nonexistent/image").contains("add size="));
}

#[test]
fn a_file_is_created_only_when_missing_and_sized() {
    let path = std::env::temp_dir().join(format!("nvme-sim-options-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let name = path.display();
    parse(&format!("{name}?size=8KiB")).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 8192);
    assert_eq!(
        parse(&format!("{name}")).unwrap().namespaces[0]
            .store
            .bytes(),
        8192
    );
    assert!(why(&format!("{name}?size=16KiB")).contains("exists and has 8192 bytes"));
    std::fs::write(&path, [0; 5000]).unwrap();
    assert!(why(&format!("{name}")).contains("not a multiple"));
    std::fs::remove_file(&path).unwrap();
}

/// Returns a text of every field of a configuration that an option sets.
fn told(config: &Config) -> String {
    let Config {
        max_queues,
        mqes,
        mdts,
        dstrd,
        mpsmin,
        mpsmax,
        cqr,
        write_cache,
        cache_bytes,
        sgl,
        serial,
        model,
        hmpre,
        hmmin,
        profile,
        faults,
        abort_limit,
        aer_limit,
        ready_delay_ns,
        sanitize_ns,
        threads,
        audit,
        namespaces,
        ..
    } = config;
    let namespaces: Vec<_> = namespaces
        .iter()
        .map(|one| {
            let bytes = one.store.bytes();
            (
                bytes,
                one.block_bytes,
                one.metadata_bytes,
                one.read_only,
                one.noiob,
            )
        })
        .collect();
    format!(
        "{max_queues} {mqes} {mdts} {dstrd} {mpsmin} {mpsmax} {cqr} {write_cache} {cache_bytes} {sgl} \
         {serial} {model} {hmpre} {hmmin} {profile:?} {faults:?} {abort_limit} {aer_limit} \
         {ready_delay_ns} {sanitize_ns} {threads} {audit} {namespaces:?}"
    )
}

/// The default in the help is the real one, and another value gives another configuration.
#[test]
fn the_defaults_of_the_table_are_those_of_the_code() {
    let plain = told(&parse("null").unwrap());
    for row in OPTIONS {
        if matches!(row.name, "size" | "fault") {
            continue;
        }
        // Without a profile that is no time.
        let default = match row.name {
            "latency" => "0ns",
            _ => row.default,
        };
        let config = parse(&format!("null?{}={default}", row.name)).expect(row.name);
        assert_eq!(told(&config), plain, "{}", row.name);
        // Options that are refused alone, since they would have no effect.
        let beside = match row.name {
            "hmmin" => "&hmpre=3",
            "seed" => "&fault=drop@p=0.5",
            _ => "",
        };
        let plain = told(&parse(&format!("null?{beside}")).unwrap());
        let other = match default {
            "on" => "off",
            "off" => "on",
            "none" => "optane",
            "4096" if row.name == "block" => "512",
            "16MiB" => "1MiB",
            "0ns" => "1us",
            text if text.parse::<u32>().is_ok() => "3",
            _ => "X",
        };
        let config = parse(&format!("null?{}={other}{beside}", row.name));
        let config = config.unwrap_or_else(|error| panic!("{error}"));
        assert_ne!(told(&config), plain, "{} has no effect", row.name);
    }
    let sizes = [
        ("mem", DEFAULT_MEMORY),
        ("null", DEFAULT_NULL),
        ("generated", DEFAULT_NULL),
    ];
    let size = OPTIONS
        .iter()
        .find(|row| row.name == "size")
        .unwrap()
        .default;
    for (place, bytes) in sizes {
        assert_eq!(parse(place).unwrap().namespaces[0].store.bytes(), bytes);
        let text = nvme_units::bytes(bytes).replace(".0 ", "");
        assert!(
            size.contains(&format!("{text} for {place}")),
            "{text} in {size}"
        );
    }
}

/// Hundreds of gigabytes take no memory, and nothing is written.
#[test]
fn a_generated_device_is_for_reading_only() {
    let config = parse("generated?size=300GB&ns=2&block=512").unwrap();
    for namespace in &config.namespaces {
        assert!(namespace.read_only && namespace.store.span().is_none());
        assert_eq!(namespace.store.bytes(), 300_000_000_000);
        let mut word = [0; 8];
        namespace.store.read_at(8 * 1000, &mut word).unwrap();
        assert_eq!(u64::from_le_bytes(word), GeneratedStore::word(1000));
    }
}

/// Every fault has a text form, and that form gives the fault with its name.
#[test]
fn the_table_has_every_fault() {
    let named = |fault: Fault| match fault {
        Fault::Drop => "drop",
        Fault::Delay(_) => "delay",
        Fault::Stubborn(_) => "stubborn",
        Fault::Reorder => "reorder",
        Fault::Duplicate => "duplicate",
        Fault::WrongCid(_) => "wrongcid",
        Fault::FlippedCid(_) => "flippedcid",
        Fault::Echo(_) => "echo",
        Fault::LateData(_) => "latedata",
        Fault::WrongPhase => "wrongphase",
        Fault::BadSqhd(_) => "badsqhd",
        Fault::Status(_) => "status",
        Fault::Cfs => "cfs",
        Fault::AllOnes => "allones",
        Fault::StuckReady => "stuckready",
        Fault::TornCqe => "torncqe",
        Fault::SanitizeFails => "sanitizefail",
        Fault::External(ExternalChange::Format(_)) => "format",
        Fault::External(ExternalChange::Shrink(_)) => "shrink",
        Fault::External(ExternalChange::Detach) => "detach",
        Fault::External(ExternalChange::Protect) => "protect",
        Fault::External(ExternalChange::Erase) => "erase",
        Fault::External(ExternalChange::Firmware(_)) => "firmware",
        Fault::External(ExternalChange::Replace) => "replace",
        Fault::External(ExternalChange::Grant(_)) => "grant",
    };
    let mut names: Vec<&str> = FAULTS.iter().map(|row| row.name).collect();
    for row in FAULTS {
        let value = match row.value {
            "" => "",
            "TIME" => ":5us",
            "BYTES" => ":512",
            "SIZE" => ":8KiB",
            "MDTS" => ":3",
            _ => ":0x281",
        };
        let rule = parse_fault(&format!("{}{value}", row.name)).expect(row.name);
        assert_eq!(named(rule.what), row.name);
        let time = matches!(
            rule.what,
            Fault::Delay(5_000)
                | Fault::Stubborn(5_000)
                | Fault::Echo(5_000)
                | Fault::LateData(5_000)
        );
        assert_eq!(time, row.value == "TIME", "{}", row.name);
        assert!(
            parse_fault(&format!("{}:", row.name)).is_err(),
            "{}",
            row.name
        );
    }
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), FAULTS.len());
    assert_eq!(
        parse_fault("flippedcid:0x9").unwrap().what,
        Fault::FlippedCid(9)
    );
    let status = parse_fault("status:0x281").unwrap().what;
    assert_eq!(status, Fault::Status(Status::UNRECOVERED_READ_ERROR));
}

#[test]
fn what_cannot_be_meant_is_refused_with_its_reason() {
    for (text, option, says) in [
        ("mem?size=1MiB&size=2MiB", "size", "twice"),
        ("mem?wc=on&wc=on", "wc", "twice"),
        ("mem?queues=+4", "queues", "+4"),
        ("mem?size=+4096", "size", "+4096"),
        ("mem?size=0", "size", "not 0"),
        ("mem?quues=4", "quues", "there are size, "),
        ("mem?queue=4", "queue", "did you mean queues=?"),
        ("mem?threads=0", "threads", "1 to 64"),
        ("mem?threads=65", "threads", "1 to 64"),
        ("mem?block=1", "block", "512 or 4096"),
        ("mem?serial=", "serial", "1 to 20"),
        ("mem?serial=012345678901234567890", "serial", "1 to 20"),
        ("mem?model=a\tb", "model", "printable"),
        ("mem?ready=5", "ready", ""),
        ("mem?fault=drop@nth=0", "fault", "nth: counts from 1"),
        ("mem?fault=drop@nth=0-2", "fault", "nth: counts from 1"),
        ("mem?fault=drop@nth=3-2", "fault", "2 comes before 3"),
        ("mem?fault=drop@every=0", "fault", "every: counts from 1"),
        ("mem?fault=drop@p=0", "fault", "0.000001 to 1"),
        ("mem?fault=drop@p=2", "fault", "0.000001 to 1"),
        ("mem?fault=drop@p=+1", "fault", "0.000001 to 1"),
        ("mem?fault=drop@p=NaN", "fault", "0.000001 to 1"),
        ("mem?fault=drop@nth=1,nth=2", "fault", "twice"),
        ("mem?fault=drop@", "fault", "name=value"),
        ("mem?fault=drop@nth=1,", "fault", "name=value"),
        (
            "mem?fault=drop@colour=red",
            "fault",
            "qid, op, nth, every, p",
        ),
        ("mem?fault=drop@op=reed", "fault", "write-zeroes"),
        (
            "mem?fault=drop@op=identify,qid=1",
            "fault",
            "leave qid= out",
        ),
        (
            "mem?fault=drop@qid=1,op=identify",
            "fault",
            "leave qid= out",
        ),
        ("mem?queues=4&fault=drop@qid=5", "fault", "qid=5"),
        ("mem?fault=drop:5", "fault", "takes no value"),
        ("mem?fault=delay", "fault", "delay:TIME"),
        ("mem?fault=delay:0ns", "fault", "at least 1ns"),
        ("mem?fault=latedata:0ns", "fault", "at least 1ns"),
        ("mem?fault=flippedcid:0", "fault", "flips no bit"),
        ("mem?fault=wrongcid:0x10000", "fault", "too large"),
        ("mem?fault=stuckready@qid=1", "fault", "befalls no command"),
        (
            "mem?fault=sanitizefail@op=sanitize",
            "fault",
            "befalls no command",
        ),
        ("mem?fault=explode", "fault", "there are drop, "),
    ] {
        let error = parse(text)
            .err()
            .unwrap_or_else(|| panic!("{text} is taken"));
        assert_eq!(error.option, option, "{text}: {error}");
        assert!(error.why.contains(says), "{text}: {error}");
    }
    // Conditions may be in any order, and `fault` may be repeated.
    let text =
        "null?fault=drop@qid=0,op=identify&fault=delay:1ms@op=0x2&queues=2&fault=drop@qid=2,p=1";
    let rules = parse(text).unwrap().faults.rules;
    assert_eq!(
        (rules[0].when.qid, rules[0].when.opcode),
        (Some(0), Some(6))
    );
    assert_eq!((rules[1].when.qid, rules[1].when.opcode), (None, Some(2)));
    assert_eq!(rules[2].when.per_million, Some(1_000_000));
}

#[test]
fn a_size_and_a_time_have_the_grammar_of_the_tool() {
    for text in ["1mib", "1MIB", "1M", "1024kib", "1048576"] {
        let config = parse(&format!("mem?size={text}")).expect(text);
        assert_eq!(config.namespaces[0].store.bytes(), 1 << 20);
    }
    let config = parse("null?ready=5ms&sanitize=2s&threads=3").unwrap();
    assert_eq!(config.ready_delay_ns, 5_000_000);
    assert_eq!((config.sanitize_ns, config.threads), (2_000_000_000, 3));
}

/// A folder with a unique name, removed at the end of the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("nvme-sim-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn files(&self) -> Vec<String> {
        let files = std::fs::read_dir(&self.0).unwrap();
        let name = |entry: std::fs::DirEntry| entry.file_name().into_string().unwrap();
        let mut names: Vec<_> = files.map(|entry| name(entry.unwrap())).collect();
        names.sort();
        names
    }

    fn text(&self, name: &str, options: &str) -> String {
        let path = self.0.join(name);
        format!("{}{options}", escape(path.to_str().unwrap()))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_path_may_have_a_question_mark_and_a_percent_sign() {
    assert_eq!(escape("a?b%3F"), "a%3Fb%253F");
    for medium in ["mem", "null", "generated"] {
        assert_eq!(image_paths(medium).unwrap(), [] as [PathBuf; 0]);
        assert_eq!(
            image_paths(&escape(medium)).unwrap(),
            [Path::new(".").join(medium)]
        );
    }
    let folder = Folder::new("escape");
    for name in ["what?", "100%", "%3F", "a%25", "?%?"] {
        let config = parse(&folder.text(name, "?size=8KiB")).expect(name);
        let created: Vec<&Path> = config.created.iter().map(|image| image.path()).collect();
        assert_eq!(created, [folder.0.join(name)]);
        drop(config);
        assert_eq!(folder.files(), [name]);
        let paths = image_paths(&folder.text(name, "?ns=2")).unwrap();
        let second = folder.0.join(format!("{name}.2"));
        assert_eq!(paths, [folder.0.join(name), second]);
        let again = parse(&folder.text(name, "")).expect(name);
        assert!(again.created.is_empty());
        std::fs::remove_file(folder.0.join(name)).unwrap();
    }
    assert_eq!(image_paths("mem?ns=2").unwrap(), [] as [PathBuf; 0]);
    assert!(image_paths("a.img?colour=red").is_err());
}

#[test]
fn what_is_refused_leaves_no_image_behind() {
    let folder = Folder::new("refused");
    for options in [
        "?size=8KiB&queues=0",
        "?size=8KiB&mdts=17",
        "?size=8KiB&block=5",
        "?size=8KiB&ns=0",
        "?size=8KiB&ro=on",
        "?size=6KiB",
        "?size=8KiB&aborts=0",
        "?size=8KiB&fault=explode",
        "?size=99PiB",
        "?size=99TiB&ns=200",
        "?size=8KiB&colour=red",
    ] {
        assert!(parse(&folder.text("new", options)).is_err(), "{options}");
        assert_eq!(folder.files(), [] as [&str; 0], "{options}");
    }
    let why = parse(&folder.text("new", "?size=8191TiB")).err().unwrap();
    assert_eq!(why.option, "size");
    assert!(
        why.why.contains("free in") && why.why.contains("smaller"),
        "{why}"
    );
    // The third image cannot be created: the first two, which were created before, are removed again.
    std::fs::write(folder.0.join("new.3"), [0; 5000]).unwrap();
    assert!(parse(&folder.text("new", "?size=8KiB&ns=3")).is_err());
    assert_eq!(folder.files(), ["new.3"]);
    // A server that cannot have its socket leaves none, either; an image that was there stays.
    let serve = |text: &str| {
        let socket = folder.0.join("new.3").join("socket");
        crate::vfio_user::Server::bind(parse(text).expect(text), &socket, 1).err()
    };
    assert!(serve(&folder.text("other", "?size=8KiB&ns=2")).is_some());
    assert_eq!(folder.files(), ["new.3"]);
    drop(parse(&folder.text("other", "?size=8KiB")).unwrap());
    assert!(serve(&folder.text("other", "?size=8KiB")).is_some());
    assert_eq!(folder.files(), ["new.3", "other"]);
}

#[test]
fn reading_creates_nothing_and_shares_the_image() {
    let folder = Folder::new("read");
    let reading = |options: &str| parse_for(&folder.text("image", options), ImageAccess::Read);
    let error = reading("?size=8KiB").err().expect("there is no image");
    assert_eq!(error.errno, Some(libc::ENOENT));
    assert_eq!(folder.files(), [] as [&str; 0]);
    drop(parse(&folder.text("image", "?size=8KiB")).unwrap());
    let first = reading("").unwrap();
    let second = reading("?size=8KiB").unwrap();
    assert!(first.namespaces[0].read_only && second.namespaces[0].read_only);
    let error = parse(&folder.text("image", ""))
        .err()
        .expect("it is in use");
    assert!(
        error.why.contains("in this process or another one"),
        "{error}"
    );
    assert_eq!(error.errno, Some(libc::EBUSY));
    drop((first, second));
    let writer = parse(&folder.text("image", "")).unwrap();
    let error = reading("").err().expect("it is in use");
    assert_eq!(error.errno, Some(libc::EBUSY));
    drop(writer);
    // One device has one image twice: by a link, as two namespaces.
    std::os::unix::fs::symlink(folder.0.join("image"), folder.0.join("image.2")).unwrap();
    let error = parse(&folder.text("image", "?ns=2")).err().expect("twice");
    assert_eq!(error.errno, Some(libc::EBUSY));
}

/// docs/simulator.md has the same tables as the code; `NVME_WRITE_DOCS=1` writes them.
#[test]
fn the_documentation_has_the_tables() {
    const BEGIN: &str = "<!-- tables: begin -->\n";
    const END: &str = "<!-- tables: end -->";
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/simulator.md");
    let text = std::fs::read_to_string(path).expect("docs/simulator.md");
    let (head, rest) = text.split_once(BEGIN).expect("the beginning of the tables");
    let (tables, tail) = rest.split_once(END).expect("the end of the tables");
    let expected = format!("\n{}\n", markdown());
    if std::env::var_os("NVME_WRITE_DOCS").is_some() {
        std::fs::write(path, format!("{head}{BEGIN}{expected}{END}{tail}")).unwrap();
    } else {
        assert_eq!(tables, expected, "run the test with NVME_WRITE_DOCS=1");
    }
}

#[test]
fn a_folder_is_no_image_to_read_either() {
    let folder = std::env::temp_dir();
    for options in ["", "?ro=on"] {
        let text = format!("{}{options}", folder.display());
        let why = parse_for(&text, ImageAccess::Read)
            .err()
            .expect("a folder")
            .errno;
        assert_eq!(why, Some(libc::EISDIR), "{text}");
    }
}

#[test]
fn the_help_has_every_row_in_the_width_asked_for() {
    let text = help(100);
    assert!(
        text.lines()
            .all(|line| line.len() <= 100 && line.trim_end() == line)
    );
    let options = OPTIONS
        .iter()
        .map(|row| format!("  {}={}", row.name, row.value));
    let faults = FAULTS.iter().map(|row| match row.value {
        "" => format!("  {}", row.name),
        value => format!("  {}:{value}", row.name),
    });
    let conditions = CONDITIONS
        .iter()
        .map(|row| format!("  {}={}", row.name, row.value));
    for head in options.chain(faults).chain(conditions) {
        assert!(text.lines().any(|line| line.starts_with(&head)), "{head}");
    }
}
