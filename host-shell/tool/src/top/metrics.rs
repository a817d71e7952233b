//! The counters as text in the exposition format of Prometheus, version 0.0.4.

use super::sample::{CounterSample, program};
use crate::common::visible;
use nvme_host::store::{CounterKind, PublishedStore, StoreStats};

/// Returns the text of all stores.
pub fn exposition(sample: &CounterSample) -> String {
    let mut text = String::new();
    let stores = sample.stores();
    for (index, (name, kind, help)) in StoreStats::COUNTERS.iter().enumerate() {
        let (kind, ending) = match kind {
            CounterKind::Total => ("counter", "_total"),
            CounterKind::Gauge => ("gauge", ""),
        };
        let name = format!("nvme_gpu_{name}{ending}");
        head(&mut text, &name, kind, help);
        for store in stores {
            let value = store.stats.values()[index];
            text.push_str(&format!("{name}{{{}}} {value}\n", labels(store)));
        }
    }
    let name = "nvme_gpu_latency_us";
    head(
        &mut text,
        name,
        "histogram",
        "Latency of commands of the CPU in microseconds.",
    );
    for store in stores {
        histogram(&mut text, name, store);
    }
    let name = "nvme_gpu_path_info";
    head(
        &mut text,
        name,
        "gauge",
        "The path of the data, with the reason for it; the value is 1.",
    );
    for store in stores {
        let path = &store.path;
        let tier = path.tier.map_or(String::new(), |tier| tier.to_string());
        let more = [
            ("data", &path.data),
            ("tier", &tier),
            ("path", &path.path),
            ("why", &path.why),
        ];
        let more: String = more
            .iter()
            .map(|(name, value)| format!(",{name}=\"{}\"", escaped(value)))
            .collect();
        text.push_str(&format!("{name}{{{}{more}}} 1\n", labels(store)));
    }
    text
}

fn head(text: &mut String, name: &str, kind: &str, help: &str) {
    let help = help.trim().replace('\\', "\\\\").replace('\n', "\\n");
    text.push_str(&format!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
}

fn labels(store: &PublishedStore) -> String {
    format!(
        "pid=\"{}\",program=\"{}\",store=\"{}\",device=\"{}\"",
        store.pid,
        escaped(&program(store.pid)),
        store.store,
        escaped(&store.path.device)
    )
}

/// Escapes the value of a label. Characters that a terminal acts on, line feeds too, become text first.
fn escaped(value: &str) -> String {
    let value = visible::line(value).replace('\\', "\\\\");
    value.replace('"', "\\\"")
}

/// Appends the buckets, which count the commands up to a latency.
fn histogram(text: &mut String, name: &str, store: &PublishedStore) {
    let (labels, counts) = (labels(store), &store.stats.latency_us);
    let mut below = 0u64;
    for (range, count) in counts.iter().enumerate() {
        below = below.saturating_add(*count);
        // The last range has no upper end.
        let end = match range + 1 == counts.len() {
            true => "+Inf".to_owned(),
            false => (1u64 << range).to_string(),
        };
        text.push_str(&format!("{name}_bucket{{{labels},le=\"{end}\"}} {below}\n"));
    }
    let sum = store.stats.latency_ns as f64 / 1000.0;
    text.push_str(&format!("{name}_sum{{{labels}}} {sum}\n"));
    text.push_str(&format!("{name}_count{{{labels}}} {below}\n"));
}
