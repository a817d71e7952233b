#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| nvme_tests::fuzz::sgl_round_trip(bytes));
