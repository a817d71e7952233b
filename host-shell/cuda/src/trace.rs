//! Events that kernels recorded, in memory that both sides map: as text, and as a trace for Perfetto. A ring keeps
//! the newest events; the number of replaced ones is reported.
// UNSAFETY: records are read out of memory that a GPU wrote.
#![allow(unsafe_code)]

use super::driver::Gpu;
use super::registered::RegisteredMemory;
use nvme_core::spec::{Cid, Qid, Status};
use nvme_core::trace::TraceEvent;
use nvme_driver::dma::pages::DmaPages;
use nvme_driver::error::Result;
use nvme_gpu_kernel::work::{LaunchArguments, TracedEvent};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

/// Records that are kept of a launch: 4 MiB.
const RECORDS: u32 = 1 << 17;

/// Memory for the events of one launch, and the recorded events of earlier ones.
pub struct LaunchTrace {
    registered: RegisteredMemory,
    pages: Arc<DmaPages>,
    recorded: RecordedEvents,
}

/// Events of launches that have ended.
#[derive(Debug, Default)]
pub struct RecordedEvents {
    records: Vec<TracedEvent>,
    lost: u64,
}

impl LaunchTrace {
    /// Creates an empty trace.
    ///
    /// # Errors
    /// [`Error::System`](nvme_driver::Error::System) and [`Error::Device`](nvme_driver::Error::Device) without memory.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let bytes = RECORDS as usize * size_of::<TracedEvent>();
        let (pages, registered) = RegisteredMemory::pinned(gpu, bytes)?;
        Ok(Self {
            registered,
            pages,
            recorded: RecordedEvents::default(),
        })
    }

    /// Returns the launch that records here.
    pub(super) fn attach(&self, launch: LaunchArguments) -> LaunchArguments {
        LaunchArguments {
            trace: self.registered.address(),
            trace_records: RECORDS,
            ..launch
        }
    }

    /// Takes the events of a launch that has ended: `traced` is the count in its report.
    pub(super) fn take(&mut self, traced: u64) {
        let start = self.pages.start().cast::<TracedEvent>();
        // SAFETY: at < RECORDS, which the pages hold; any words are a valid record, and the kernel that wrote
        // them has ended, so no record changes while it is read.
        let (records, lost) = newest(traced, RECORDS, |at| unsafe {
            start.add(at).read_volatile()
        });
        self.recorded.records.extend(records);
        self.recorded.lost = self.recorded.lost.saturating_add(lost);
    }

    /// Records that the host ends the commands in flight, and those whose thread no longer waits.
    pub(super) fn reclaim(&mut self, in_flight: &[(Qid, Cid)]) {
        let ends = reclaimed(&self.recorded.records, in_flight);
        self.recorded.records.extend(ends);
    }

    /// Returns the recorded events, to be taken or extended.
    pub(super) fn recorded(&mut self) -> &mut RecordedEvents {
        &mut self.recorded
    }

    /// Returns the text for the file `path`: for a name that ends in `.json` a Chrome trace, which ui.perfetto.dev
    /// shows, else one line for each event.
    pub fn text_for(&self, path: &Path) -> String {
        let RecordedEvents { records, lost } = &self.recorded;
        match path.extension().is_some_and(|end| end == "json") {
            true => chrome(records, *lost).to_string(),
            false => lines(records, *lost),
        }
    }
}

impl RecordedEvents {
    /// Adds events that were recorded earlier.
    pub(super) fn go_on_from(&mut self, earlier: Self) {
        self.records.splice(0..0, earlier.records);
        self.lost = self.lost.saturating_add(earlier.lost);
    }
}

/// Returns the records that a ring of `size` still holds after `traced` were written to it, oldest first, and the
/// number of replaced ones. `at` reads the record at an index below `size`.
fn newest(
    traced: u64,
    size: u32,
    at: impl Fn(usize) -> TracedEvent,
) -> (impl Iterator<Item = TracedEvent>, u64) {
    let lost = traced.saturating_sub(u64::from(size));
    let place = move |number: u64| (number % u64::from(size)) as usize;
    ((lost..traced).map(move |number| at(place(number))), lost)
}

/// True if the record has the kind of `of`.
fn is_kind(record: &TracedEvent, of: TraceEvent) -> bool {
    record.event[0] >> 56 == of.to_words()[0] >> 56
}

/// Returns end records for commands that have none in `records`: those in flight, and those that
/// expired, since a completion that arrives after its wait ended is not recorded.
fn reclaimed(records: &[TracedEvent], in_flight: &[(Qid, Cid)]) -> Vec<TracedEvent> {
    let (qid, cid) = (Qid(0), Cid(0));
    let [submitted, completed, expired, reclaimed] = [
        TraceEvent::submitted(qid, cid, 0, 0),
        TraceEvent::completed(qid, cid, Status::SUCCESS, 0),
        TraceEvent::expired(qid, cid, 0),
        TraceEvent::reclaimed(qid, cid),
    ];
    let (mut open, mut ends) = (BTreeMap::new(), BTreeSet::new());
    let in_order = in_order(records);
    for (_, record) in &in_order {
        let command = of_command(record);
        if is_kind(record, submitted) {
            open.insert(command, *record);
        } else if is_kind(record, expired) {
            ends.insert(command);
        } else if is_kind(record, completed) || is_kind(record, reclaimed) {
            open.remove(&command);
            ends.remove(&command);
        }
    }
    ends.extend(in_flight.iter().copied());
    let now_ns = in_order.last().map_or(1, |(_, record)| record.now_ns);
    let ends = ends.iter().filter_map(|command| open.get(command));
    let end = |start: &TracedEvent| {
        let (qid, cid) = of_command(start);
        TracedEvent {
            event: TraceEvent::reclaimed(qid, cid).to_words(),
            now_ns,
            ..*start
        }
    };
    ends.map(end).collect()
}

/// Sorts the records by time, and returns them with times relative to the first event.
fn in_order(records: &[TracedEvent]) -> Vec<(u64, TracedEvent)> {
    let mut sorted = records.to_vec();
    sorted.sort_by_key(|record| record.now_ns);
    let first = sorted.first().map_or(0, |record| record.now_ns);
    let since = |record: TracedEvent| (record.now_ns - first, record);
    sorted.into_iter().map(since).collect()
}

/// Formats each record as one line of text, in the order of time; `lost` older ones were replaced.
pub fn lines(records: &[TracedEvent], lost: u64) -> String {
    let mut text = String::new();
    if lost > 0 {
        text.push_str(&format!("{lost} older events were replaced\n"));
    }
    for (at, record) in in_order(records) {
        text.push_str(&format!(
            "{at:>12} ns  #{:<8} {}\n",
            record.index,
            TraceEvent::from_words(record.event)
        ));
    }
    text
}

/// Returns the queue and the CID of an event.
fn of_command(record: &TracedEvent) -> (Qid, Cid) {
    let event = TraceEvent::from_words(record.event);
    (event.qid(), event.cid())
}

/// Returns a Chrome trace: a slice from submission to the end of each command, on a track for each queue and
/// slot. Commands without an end, and other events, are instants.
pub fn chrome(records: &[TracedEvent], lost: u64) -> Value {
    let submitted = TraceEvent::submitted(Qid(0), Cid(0), 0, 0);
    let mut open = std::collections::HashMap::new();
    let (mut events, mut unfinished) = (Vec::new(), Vec::new());
    for (at, record) in in_order(records) {
        let (qid, cid) = of_command(&record);
        let place = json!({ "pid": qid.0, "tid": cid.0 & 0xFFF });
        let mut event = json!({
            "name": TraceEvent::from_words(record.event).to_string(), "pid": place["pid"], "tid": place["tid"],
            "args": { "index": record.index },
        });
        if is_kind(&record, submitted) {
            // The end of one that was there was not recorded.
            unfinished.extend(open.insert((qid, cid, record.index), (at, event)));
            continue;
        }
        match open.remove(&(qid, cid, record.index)) {
            Some((began, start)) => {
                event["ph"] = json!("X");
                event["ts"] = json!(began as f64 / 1e3);
                event["dur"] = json!((at - began) as f64 / 1e3);
                event["args"]["submitted"] = start["name"].clone();
            }
            None => {
                event["ph"] = json!("i");
                event["s"] = json!("t");
                event["ts"] = json!(at as f64 / 1e3);
            }
        }
        events.push(event);
    }
    unfinished.extend(open.into_values());
    unfinished.sort_by_key(|(at, _)| *at);
    for (at, mut event) in unfinished {
        event["ph"] = json!("i");
        event["s"] = json!("t");
        event["ts"] = json!(at as f64 / 1e3);
        events.push(event);
    }
    json!({ "displayTimeUnit": "ns", "traceEvents": events, "otherData": { "replaced": lost } })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(event: TraceEvent, index: u64, now_ns: u64) -> TracedEvent {
        TracedEvent {
            event: event.to_words(),
            index,
            now_ns,
        }
    }

    fn some() -> Vec<TracedEvent> {
        let (qid, one, two) = (Qid(3), Cid(0x1001), Cid(2));
        vec![
            record(TraceEvent::completed(qid, one, Status(0), 7), 0, 5_500),
            record(TraceEvent::submitted(qid, one, 2, 1), 0, 4_000),
            record(TraceEvent::submitted(qid, two, 2, 1), 1, 4_100),
        ]
    }

    #[test]
    fn text_is_in_the_order_of_time() {
        let text = lines(&some(), 4);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "4 older events were replaced");
        assert!(lines[1].contains(" 0 ns  #0 "), "{}", lines[1]);
        assert!(
            lines[3].contains("1500 ns") && lines[3].contains("completed"),
            "{}",
            lines[3]
        );
    }

    #[test]
    fn a_command_is_a_slice_and_one_without_an_end_an_instant() {
        let value = chrome(&some(), 0);
        let events = value["traceEvents"].as_array().unwrap();
        assert_eq!(events.len(), 2);
        assert_eq!(events[0]["ph"], "X");
        assert_eq!(
            (&events[0]["ts"], &events[0]["dur"]),
            (&json!(0.0), &json!(1.5))
        );
        assert_eq!(
            (&events[0]["pid"], &events[0]["tid"]),
            (&json!(3), &json!(1))
        );
        assert_eq!(
            (&events[1]["ph"], &events[1]["ts"]),
            (&json!("i"), &json!(0.1))
        );
    }

    #[test]
    fn what_the_host_ends_has_an_end_in_the_trace() {
        let mut records = some();
        let in_flight = [(Qid(3), Cid(2)), (Qid(3), Cid(9))];
        assert_eq!(reclaimed(&records, &[]), []);
        let ends = reclaimed(&records, &in_flight);
        let end = record(TraceEvent::reclaimed(Qid(3), Cid(2)), 1, 5_500);
        assert_eq!(ends, [end], "one was not submitted here, and one has ended");
        // Once its wait has ended in a time-out, the command has ended for the trace, in flight or not.
        records.push(record(TraceEvent::expired(Qid(3), Cid(2), 5_000), 1, 5_000));
        assert_eq!(reclaimed(&records, &[]), [end]);
        records.push(end);
        assert_eq!(reclaimed(&records, &in_flight), []);
        assert!(chrome(&records, 0)["traceEvents"][0]["ph"] == "X");
    }

    #[test]
    fn a_trace_goes_on_from_an_earlier_one() {
        let some = some();
        let recorded = |records: &[TracedEvent], lost| RecordedEvents {
            records: records.to_vec(),
            lost,
        };
        let mut both = recorded(&some[..1], 1);
        both.go_on_from(recorded(&some[1..], 2));
        assert_eq!((both.records.len(), both.lost), (3, 3));
    }

    /// A count that no kernel can have reached is as good as any other.
    #[test]
    fn a_ring_gives_its_newest_records_in_order() {
        let ring = |size: u32, traced: u64| {
            let (records, lost) = newest(traced, size, |at| {
                assert!(at < size as usize);
                record(TraceEvent::from_words([u64::MAX; 2]), at as u64, 0)
            });
            let places: Vec<u64> = records.map(|record| record.index).collect();
            (places, lost)
        };
        assert_eq!(ring(4, 0), (vec![], 0));
        assert_eq!(ring(4, 3), (vec![0, 1, 2], 0));
        assert_eq!(ring(4, 4), (vec![0, 1, 2, 3], 0));
        assert_eq!(ring(4, 6), (vec![2, 3, 0, 1], 2));
        assert_eq!(ring(3, u64::MAX), (vec![0, 1, 2], u64::MAX - 3));
    }

    /// Found by fuzzing: the first of two submissions without an end between them was lost.
    #[test]
    fn a_submission_whose_end_was_not_recorded_is_kept() {
        let again = record(TraceEvent::submitted(Qid(3), Cid(2), 2, 1), 1, 4_200);
        let value = chrome(&[some()[2], again], 0);
        let events = value["traceEvents"].as_array().unwrap();
        let times: Vec<_> = events.iter().map(|event| &event["ts"]).collect();
        assert_eq!(times, [&json!(0.0), &json!(0.1)]);
    }
}
