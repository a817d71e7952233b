#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| nvme_tests::fuzz::kv_messages(bytes));
