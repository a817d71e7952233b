//! Traces are not trusted: any words are decoded to events, as text and as a Chrome trace.

use arbitrary::{Arbitrary, Unstructured};
use nvme_core::spec::{Cid, Qid, Status};
use nvme_core::trace::TraceEvent;
use nvme_cuda::trace;
use nvme_gpu_kernel::work::TracedEvent;

/// A record that is plausible, or any words.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Record {
    Submitted {
        cid: u16,
        opcode: u8,
        nsid: u32,
        index: u8,
        at: u16,
    },
    Completed {
        cid: u16,
        status: u16,
        sqhd: u16,
        index: u8,
        at: u16,
    },
    Expired {
        cid: u16,
        index: u8,
        at: u64,
    },
    Reclaimed {
        cid: u16,
        index: u8,
        at: u16,
    },
    Fault {
        cid: u16,
        upper: u64,
    },
    Any {
        event: [u64; 2],
        index: u64,
        at: u64,
    },
}

impl Record {
    fn traced(self) -> TracedEvent {
        let q = Qid(1);
        let (event, index, now_ns) = match self {
            Self::Submitted {
                cid,
                opcode,
                nsid,
                index,
                at,
            } => (
                TraceEvent::submitted(q, Cid(cid % 8), opcode, nsid),
                u64::from(index % 4),
                u64::from(at),
            ),
            Self::Completed {
                cid,
                status,
                sqhd,
                index,
                at,
            } => {
                let event = TraceEvent::completed(q, Cid(cid % 8), Status(status), sqhd);
                (event, u64::from(index % 4), u64::from(at))
            }
            Self::Expired { cid, index, at } => (
                TraceEvent::expired(q, Cid(cid % 8), at),
                u64::from(index % 4),
                at,
            ),
            Self::Reclaimed { cid, index, at } => (
                TraceEvent::reclaimed(q, Cid(cid % 8)),
                u64::from(index % 4),
                u64::from(at),
            ),
            Self::Fault { cid, upper } => (TraceEvent::fault(q, Cid(cid), upper), 0, 0),
            Self::Any { event, index, at } => (TraceEvent::from_words(event), index, at),
        };
        TracedEvent {
            event: event.to_words(),
            index,
            now_ns,
        }
    }
}

/// The records and the count of lost ones come from `bytes`.
pub fn trace_decoder(bytes: &[u8]) {
    let mut input = Unstructured::new(bytes);
    let Ok(lost) = u64::arbitrary(&mut input) else {
        return;
    };
    let Ok(records) = Vec::<Record>::arbitrary_take_rest(input) else {
        return;
    };
    let records: Vec<TracedEvent> = records.into_iter().map(Record::traced).collect();
    for record in &records {
        let event = TraceEvent::from_words(record.event);
        assert_eq!(event.to_words(), record.event);
        let text = event.to_string();
        assert!(text.starts_with("queue ") && !text.contains('\n'), "{text}");
    }
    let text = trace::lines(&records, lost);
    assert_eq!(text.lines().count(), records.len() + usize::from(lost > 0));
    chrome(&records, lost);
}

/// Each record is in the trace once: alone, or as one of the two ends of a slice.
fn chrome(records: &[TracedEvent], lost: u64) {
    let text = trace::chrome(records, lost).to_string();
    let value: serde_json::Value = serde_json::from_str(&text).expect("the trace is JSON");
    let events = value["traceEvents"].as_array().expect("a list of events");
    assert_eq!(value["otherData"]["replaced"], lost);
    let mut count = 0;
    for event in events {
        assert!(event["ts"].as_f64().expect("a time") >= 0.0, "{event}");
        assert!(event["pid"].is_u64() && event["tid"].is_u64() && event["name"].is_string());
        count += match event["ph"].as_str() {
            Some("X") => {
                assert!(event["dur"].as_f64().expect("a length") >= 0.0, "{event}");
                2
            }
            Some("i") => 1,
            other => panic!("phase {other:?} of {event}"),
        };
    }
    assert_eq!(count, records.len(), "every event is in the trace once");
}
