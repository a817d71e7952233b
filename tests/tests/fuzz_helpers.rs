//! Runs the code of the fuzz targets over their seed corpora and over random bytes.
#![cfg(all(not(loom), feature = "fuzz"))]

use nvme_tests::fuzz;
use proptest::prelude::*;
use std::path::Path;

#[test]
fn every_seed_of_every_corpus_passes() {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz");
    let manifest = std::fs::read_to_string(fuzz.join("Cargo.toml")).unwrap();
    assert_eq!(
        manifest.matches("[[bin]]").count(),
        fuzz::TARGETS.len(),
        "a target is missing here"
    );
    for (name, target) in fuzz::TARGETS {
        assert!(
            manifest.contains(&format!("name = \"{name}\"")),
            "{name} is no target"
        );
        let mut seeds = 0;
        for entry in std::fs::read_dir(fuzz.join("corpus").join(name)).unwrap() {
            let path = entry.unwrap().path();
            println!("{}", path.display());
            target(&std::fs::read(path).unwrap());
            seeds += 1;
        }
        assert!(seeds > 0, "{name} has no seeds");
    }
}

/// Every option, fault and condition of the simulator's tables is a word of the dictionary.
#[test]
fn the_dictionary_of_device_strings_has_every_name() {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/dictionaries/device_string.dict");
    let text = std::fs::read_to_string(path).unwrap();
    let has = |word: String| {
        text.lines()
            .any(|line| line.starts_with(&format!("\"{word}")))
    };
    let missing = |words: Vec<String>| -> Vec<String> {
        words
            .into_iter()
            .filter(|word| !has(word.clone()))
            .collect()
    };
    use nvme_sim::config::{CONDITIONS, FAULTS, OPTIONS};
    let mut words: Vec<String> = OPTIONS.iter().map(|row| format!("{}=", row.name)).collect();
    words.extend(CONDITIONS.iter().map(|row| format!("{}=", row.name)));
    words.extend(FAULTS.iter().map(|row| match row.value {
        "" => format!("{}\"", row.name),
        _ => format!("{}:\"", row.name),
    }));
    assert_eq!(missing(words), Vec::<String>::new());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_buffer_survives_the_prp_round_trip(bytes in prop::collection::vec(any::<u8>(), 16..20)) {
        fuzz::prp_round_trip(&bytes);
    }

    #[test]
    fn any_stream_of_completions_ends_commands_at_most_once(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        fuzz::cqe_stream(&bytes);
    }

    #[test]
    fn any_header_and_node_of_an_index_is_data(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        fuzz::search_index(&bytes);
    }

    #[test]
    fn any_message_of_a_page_store_is_read_or_refused(reply in any::<bool>(), body in prop::collection::vec(any::<u8>(), 0..300)) {
        fuzz::kv_messages(&[&[u8::from(reply)], &b"NVMEKVMS\x01\0\0\0"[..], &body].concat());
    }

    #[test]
    fn any_change_of_a_page_store_is_a_miss_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        fuzz::kv_pages(&bytes);
    }

    #[test]
    fn any_text_of_a_manifest_is_data(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        fuzz::manifest(&bytes);
    }

    #[test]
    fn any_answer_of_vfio_is_data(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        fuzz::vfio_answers(&bytes);
    }

    #[test]
    fn any_completions_end_the_commands_of_a_shared_queue_at_most_once(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        fuzz::shared_queue(&bytes);
    }

    #[test]
    fn any_completions_end_the_commands_of_a_collective_at_most_once(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        fuzz::collective(&bytes);
    }

    #[test]
    fn any_segments_survive_the_sgl_round_trip(bytes in prop::collection::vec(any::<u8>(), 0..120)) {
        fuzz::sgl_round_trip(&bytes);
    }

    #[test]
    fn any_access_to_registers_is_survived(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        fuzz::registers(&bytes);
    }

    #[test]
    fn any_trace_is_data(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        fuzz::trace_decoder(&bytes);
    }

    #[test]
    fn any_page_is_data(bytes in prop::collection::vec(any::<u8>(), 0..4096)) {
        fuzz::identify_log_pages(&bytes);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_controller_is_survived(bytes in prop::collection::vec(any::<u8>(), 0..1200)) {
        fuzz::hostile_controller(&bytes);
    }

    #[test]
    fn any_driver_is_survived(bytes in prop::collection::vec(any::<u8>(), 0..1200)) {
        fuzz::hostile_driver(&bytes);
    }

    #[test]
    fn any_client_of_vfio_user_is_survived(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        fuzz::vfio_user_message(&bytes);
    }

    #[test]
    fn any_guest_is_survived(bytes in prop::collection::vec(any::<u8>(), 0..1200)) {
        fuzz::guest_memory(&bytes);
    }

    #[test]
    fn any_device_string_is_answered(text in "[a-z]{2,8}=[0-9a-z@,:.]{0,12}(&[a-z]{2,8}=[0-9a-zA-Z@,:]{0,8}){0,3}") {
        fuzz::device_string(text.as_bytes());
    }
}
