//! The trace ring under loom: a reader beside the writer.

use loom::thread;
use nvme_core::sync::AtomicU64;
use nvme_core::trace::{TraceEvent, TraceRing};
use nvme_tests::model::{Bound, check};
use std::sync::Arc;

#[test]
fn an_event_that_is_not_the_newest_is_read_whole_or_not_at_all() {
    check(
        "one records while another reads: an event that is not the newest is its own, or reported as lost",
        Bound::Exhaustive,
        || {
            // Two events fit.
            let words: Arc<[AtomicU64; 5]> = Arc::new(std::array::from_fn(|_| AtomicU64::new(0)));
            let writer = words.clone();
            let writer = thread::spawn(move || {
                for number in 1..4 {
                    TraceRing::new(&writer[..]).record(TraceEvent::from_words([number; 2]));
                }
            });
            // The reader is the second thread, so that it meets each action of the writer, early or late.
            let seen = words.clone();
            let reader = thread::spawn(move || {
                let ring = TraceRing::new(&seen[..]);
                for number in 0..ring.recorded().saturating_sub(1) {
                    if let Some(event) = ring.read(number) {
                        assert_eq!(event.to_words(), [number + 1; 2]);
                    }
                }
            });
            writer.join().unwrap();
            reader.join().unwrap();
            let ring = TraceRing::new(&words[..]);
            assert_eq!(ring.read(0), None);
            assert_eq!(ring.read(2), Some(TraceEvent::from_words([3; 2])));
        },
    );
}
