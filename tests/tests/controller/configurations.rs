//! Configurations of the simulator, from text and from code: their meaning, and the reasons why
//! some are refused.

use nvme_core::spec::{admin, nvm};
use nvme_sim::config::{NamespaceConfig, parse};
use nvme_sim::{Config, Controller, MemoryStore, VecMemory};

/// Returns the option that is to blame and why, or that all is well.
fn refusal(change: impl FnOnce(&mut Config)) -> Option<(String, String)> {
    let mut config = Config::default();
    change(&mut config);
    let error = Controller::new(config, VecMemory::new(4096)).err()?;
    Some((error.option, error.why))
}

#[test]
fn the_default_is_a_controller() {
    assert_eq!(refusal(|_| ()), None);
}

#[test]
fn values_out_of_range_are_named_with_their_range() {
    type Change = fn(&mut Config);
    let cases: [(&str, &str, Change); 12] = [
        ("ns", "1 to 256", |config| config.namespaces.clear()),
        ("block", "512 or 4096", |config| {
            config.namespaces[0].block_bytes = 1024;
        }),
        ("size", "multiple", |config| {
            let store = MemoryStore::new(4096 + 512).unwrap();
            config.namespaces = vec![NamespaceConfig::new(4096, Box::new(store))];
        }),
        ("queues", "1 to 4095", |config| config.max_queues = 0),
        ("queues", "1 to 4095", |config| config.max_queues = 4096),
        ("mqes", "2 to 65536", |config| config.mqes = 1),
        ("dstrd", "0 to 10", |config| config.dstrd = 11),
        ("mpsmin", "at most 4", |config| config.mpsmax = 5),
        ("mpsmin", "not be above", |config| {
            (config.mpsmin, config.mpsmax) = (2, 1);
        }),
        ("mdts", "0 to 16", |config| config.mdts = 17),
        ("limit", "1 to 256", |config| config.abort_limit = 0),
        ("limit", "1 to 256", |config| config.aer_limit = 257),
    ];
    for (option, range, change) in cases {
        let (named, why) = refusal(change).expect(option);
        assert!(named == option && why.contains(range), "{named}: {why}");
    }
}

#[test]
fn a_fault_names_commands_by_word_and_by_number() {
    use admin::opcode as a;
    use nvm::opcode as n;
    let cases = [
        ("identify", a::IDENTIFY, true),
        ("create-cq", a::CREATE_IO_CQ, true),
        ("create-sq", a::CREATE_IO_SQ, true),
        ("delete-cq", a::DELETE_IO_CQ, true),
        ("delete-sq", a::DELETE_IO_SQ, true),
        ("abort", a::ABORT, true),
        ("get-features", a::GET_FEATURES, true),
        ("set-features", a::SET_FEATURES, true),
        ("get-log-page", a::GET_LOG_PAGE, true),
        ("format", a::FORMAT_NVM, true),
        ("flush", n::FLUSH, false),
        ("write", n::WRITE, false),
        ("read", n::READ, false),
        ("compare", n::COMPARE, false),
        ("write-zeroes", n::WRITE_ZEROES, false),
        ("dsm", n::DATASET_MANAGEMENT, false),
        ("verify", n::VERIFY, false),
        ("0x7f", 0x7F, false),
    ];
    for (word, opcode, is_admin) in cases {
        let config = parse(&format!("null?fault=drop@op={word},every=3,p=0.25")).expect(word);
        let when = config.faults.rules[0].when;
        assert_eq!(when.opcode, Some(opcode), "{word}");
        assert_eq!(when.qid, is_admin.then_some(0), "{word}");
        assert_eq!((when.every, when.per_million), (Some(3), Some(250_000)));
    }
}

#[test]
fn a_fault_that_is_none_is_told_why() {
    let cases = [
        (
            "fault=sleep",
            "no fault is called 'sleep'; there are drop, ",
        ),
        ("fault=delay", "delay:TIME"),
        ("fault=status:0", "1 to 0x7fff"),
        ("fault=status:0x8000", "1 to 0x7fff"),
        ("fault=drop@now", "name=value"),
        ("fault=drop@p=2", "0.000001 to 1"),
        ("fault=drop@p=x", "0.000001 to 1"),
        ("fault=drop@when=3", "qid, op, nth, every, p"),
        ("size", "name=value"),
    ];
    for (options, why) in cases {
        let error = parse(&format!("null?{options}")).err().expect(options);
        assert!(error.why.contains(why), "{options}: {error}");
    }
    let error = parse("?size=1MiB").err().expect("no place");
    assert!(
        error.why.contains("path, mem, null or generated"),
        "{error}"
    );
}
