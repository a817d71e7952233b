//! Structures and texts from outside are not trusted: no content makes the parsers panic.

use nvme_core::spec::identify::{self, ActiveNamespaces, IdentifyController, IdentifyNamespace};
use nvme_core::spec::log_page::{self, ErrorEntry, FirmwareSlots, SmartData};
use nvme_core::spec::{Status, feature};
use nvme_driver::sysfs::PciAddress;
use nvme_driver::units;
use zerocopy::FromBytes;

/// Calls every accessor of the Identify and log pages over any bytes.
pub fn identify_log_pages(bytes: &[u8]) {
    let mut page = [0u8; 4096];
    let len = bytes.len().min(page.len());
    page[..len].copy_from_slice(&bytes[..len]);

    if let Ok(controller) = IdentifyController::read_from_bytes(&page) {
        // Each byte is four characters at most.
        let text = |bytes| identify::PrintableText(bytes).to_string();
        assert!(text(&controller.sn).len() <= 80);
        assert!(text(&controller.mn).len() <= 160);
        assert!((1..=256).contains(&controller.abort_limit()));
        assert!((1..=256).contains(&controller.async_event_limit()));
        assert!((1..=256).contains(&controller.error_entries()));
        assert!(controller.power_states().len() <= 32);
    }
    if let Ok(namespace) = IdentifyNamespace::read_from_bytes(&page) {
        assert!(namespace.lba_format_index() < 64);
        if let Some(bytes) = namespace.block_bytes() {
            assert!(bytes.is_power_of_two() && bytes >= 512);
        }
    }
    if let Ok(list) = ActiveNamespaces::read_from_bytes(&page) {
        assert!(list.iter().all(|nsid| nsid.0 != 0));
        assert!(list.iter().count() <= 1024);
    }
    let told: usize = identify::descriptors(bytes)
        .map(|descriptor| 4 + descriptor.nid.len())
        .sum();
    assert!(told <= bytes.len(), "descriptors reach past the page");

    let entries = page.chunks_exact(size_of::<ErrorEntry>());
    for entry in entries.filter_map(|chunk| ErrorEntry::read_from_bytes(chunk).ok()) {
        let text = entry.status().to_string();
        assert!(!text.is_empty());
    }
    if let Ok((smart, _)) = SmartData::read_from_prefix(&page) {
        assert_eq!(
            log_page::bytes(log_page::u128(&smart.power_cycles)),
            smart.power_cycles
        );
        assert!(u32::from(smart.kelvins()) <= 0xFFFF);
    }
    if let Ok((slots, _)) = FirmwareSlots::read_from_prefix(&page) {
        assert!(slots.active_slot() < 8 && slots.next_slot() < 8);
    }
    for pair in page.chunks_exact(4).take(64) {
        let value = u32::from_le_bytes([pair[0], pair[1], pair[2], pair[3]]);
        let (sqs, cqs) = feature::NumberOfQueues::granted(value);
        assert!((1..=65_536).contains(&sqs) && (1..=65_536).contains(&cqs));
        let status = Status(value as u16 >> 1);
        assert_eq!(status.is_success(), status.code() == 0);
        assert!(!status.to_string().contains('\n'));
    }
}

/// Parses a text after `sim:`, as a user may mistype it: the result is an error with a reason, or a
/// configuration.
pub fn device_string(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    // The test opens only the null device: the fuzzer must not create files or memory of arbitrary
    // size.
    let options = text.split_once('?').map_or(text, |(_, options)| options);
    match nvme_sim::config::parse(&format!("null?{options}")) {
        Ok(config) => assert!(!config.namespaces.is_empty(), "{options}: no namespace"),
        Err(error) => assert!(!error.to_string().is_empty(), "{options}: no reason given"),
    }
    place(text);
    words(text);
}

/// Checks that any path can be written so that it is read as that path and nothing else.
fn place(text: &str) {
    use nvme_sim::config::{escape, image_paths};
    if text.is_empty() {
        return;
    }
    let named = image_paths(&format!("{}?ns=2", escape(text))).expect("options that are right");
    let second = format!("{text}.2");
    // A file with the name of a medium is named by its folder.
    let is_that = |path: &std::path::Path, text: &str| {
        let written = path.to_str().expect("the text was one");
        written == text || written.strip_prefix("./") == Some(text)
    };
    assert_eq!(named.len(), 2, "{text}");
    assert!(
        is_that(&named[0], text) && is_that(&named[1], &second),
        "{named:?}: {text}"
    );
    // Looks at no file, so any text will do.
    match image_paths(text) {
        Ok(paths) => assert!(paths.len() <= 256, "{text}"),
        Err(error) => assert!(!error.to_string().is_empty(), "{text}: no reason given"),
    }
}

/// The words of other options: PCI addresses, sizes, numbers and times.
fn words(text: &str) {
    if let Ok(address) = text.parse::<PciAddress>() {
        let again = address.to_string().parse();
        assert_eq!(again, Ok(address), "{text} is not what it is written as");
    }
    if let Ok(bytes) = units::parse_bytes(text) {
        assert!(
            bytes == 0 || !units::bytes(bytes).starts_with("0 "),
            "{text}"
        );
    }
    if let Ok(number) = units::parse_number(text) {
        assert_eq!(units::parse_number(&format!("{number:#x}")), Ok(number));
    }
    if let Ok(time) = units::parse_duration(text) {
        assert!(!time.is_zero() && !units::nanoseconds(time.as_nanos() as u64).is_empty());
    }
}
