//! A run as text: its date, its device without paths, and a line for each rung.

use super::record::{StepEnd, WitnessRecord, WitnessStep};
use nvme_host::units;
use std::time::{SystemTime, UNIX_EPOCH};

/// Formats the time in UTC, as 2026-11-25T02:30:00Z.
pub fn date(at: SystemTime) -> String {
    let seconds = at
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z",
        second / 3600,
        second / 60 % 60,
        second % 60
    )
}

/// Converts a day since 1970-01-01 to year, month and day, by eras of 400 years that begin in
/// March.
fn civil(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year + u64::from(month <= 2), month, day)
}

/// Returns a number that another run does not have.
pub fn salt() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(1, |since| since.as_nanos() as u64);
    let id = u64::from(std::process::id());
    nvme_host::bench::SplitMix::new(now ^ id.rotate_left(40)).next_word()
}

/// Returns the kind of the device, without a path and without options that identify a drive.
pub fn device(device: &str) -> String {
    let (kind, rest) = device.split_once(':').unwrap_or((device, ""));
    let (name, options) = rest.split_once('?').unwrap_or((rest, ""));
    let name = match (kind, name) {
        ("sim", "mem" | "null" | "generated") | ("vfio" | "kmod", _) => name,
        _ => "PATH",
    };
    let is_public = |option: &&str| {
        let name = option.split('=').next().unwrap_or_default();
        matches!(
            name,
            "size" | "block" | "queues" | "mdts" | "threads" | "wc" | "fault"
        )
    };
    let options: Vec<&str> = options.split('&').filter(is_public).collect();
    match options.is_empty() {
        true => format!("{kind}:{name}"),
        false => format!("{kind}:{name}?{}", options.join("&")),
    }
}

/// Returns the controller, and a line for each rung.
pub fn table(record: &WitnessRecord) -> String {
    let mut text = String::new();
    if let Some(one) = &record.controller {
        let mdts = one.mdts_bytes.map_or("none".to_owned(), units::bytes);
        text.push_str(&format!("{} {}, MDTS {mdts}", one.model, one.firmware));
        if let Some(rate) = one.link.as_ref().and_then(|link| link.trained) {
            text.push_str(&format!(", link gen{} x{}", rate.generation, rate.lanes));
        }
        text.push('\n');
    }
    if let Some(gpu) = &record.gpu {
        let driver = gpu.driver.as_deref().unwrap_or("not known");
        text.push_str(&format!("{}, driver {driver}\n", gpu.model));
    }
    for step in &record.steps {
        text.push_str(&line(step));
        text.push('\n');
    }
    text
}

fn line(step: &WitnessStep) -> String {
    let by = match step.by {
        super::record::SubmittingProcessor::Cpu => "cpu",
        super::record::SubmittingProcessor::Gpu => "gpu",
    };
    let mut text = format!("{:<18} {by} ", step.name);
    match (step.outcome, &step.measured) {
        (StepEnd::Ok, Some(one)) => {
            text.push_str(&format!("{:>8.3} GB/s", one.gb_per_s));
            if let Some(share) = one.of_link {
                text.push_str(&format!(", {:.0} % of the link", share * 100.0));
            }
            text.push_str(&format!(", {}", units::bytes(one.bytes)));
            if let Some(verified) = &step.verified {
                text.push_str(match verified.zero_share {
                    share if share >= 1.0 => ", verified, but all zeroes",
                    _ => ", verified",
                });
            }
            if let Some(tier) = &step.tier {
                text.push_str(&format!(", tier {}", tier.tier));
            }
        }
        (StepEnd::Ok, None) => text.push_str("ok"),
        (StepEnd::Failed, _) => {
            let error = step.error.as_ref();
            let message = error.map_or("", |error| error.message.as_str());
            text.push_str(&format!("FAILED: {message}"));
        }
        (StepEnd::Skipped, _) => {
            text.push_str(&format!("skipped: {}", step.why.as_deref().unwrap_or("")));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_827_696, "2000-02-29T12:34:56Z"),
            (1_795_573_800, "2026-11-25T02:30:00Z"),
            (4_107_542_399, "2100-02-28T23:59:59Z"),
        ] {
            assert_eq!(date(UNIX_EPOCH + Duration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn a_device_is_named_without_its_path() {
        for (text, clean) in [
            ("vfio:0000:01:00.0", "vfio:0000:01:00.0"),
            ("kmod:01:00.0", "kmod:01:00.0"),
            (
                "sim:mem?size=1GiB&serial=S1&mdts=8",
                "sim:mem?size=1GiB&mdts=8",
            ),
            ("sim:/home/case/x.img?serial=S1", "sim:PATH"),
            ("vfio-user:/run/x", "vfio-user:PATH"),
        ] {
            assert_eq!(device(text), clean);
        }
    }
}
