//! Interrupts by eventfd: arming, masking, the pin.

use super::*;
use crate::bus::interrupt::InterruptSink;
use crate::event::EventFd;
use crate::vfio_user::irq::InterruptLines;
use crate::vfio_user::wire::irq;

const INVAL: i32 = libc::EINVAL;
const NONE: u32 = wire::SET_DATA_NONE;
const BOOL: u32 = wire::SET_DATA_BOOL;
const EVENTFD: u32 = wire::SET_DATA_EVENTFD;
const MASK: u32 = wire::SET_MASK;
const UNMASK: u32 = wire::SET_UNMASK;
const TRIGGER: u32 = wire::SET_TRIGGER;

/// (index, flags, start, count)
type Set = (u32, u32, u32, u32);

fn set(client: &mut Client, set: Set, data: &[u8], events: &[&EventFd]) -> i32 {
    let (index, flags, start, count) = set;
    let head = wire::IrqSet {
        argsz: 20 + data.len() as u32,
        flags,
        index,
        start,
        count,
    };
    let body = [head.as_bytes(), data].concat();
    let fds: Vec<_> = events.iter().map(|event| event.fd()).collect();
    match client.send(command::DEVICE_SET_IRQS, &body, &fds) {
        Ok((body, _)) => body.len() as i32,
        Err(errno) => errno,
    }
}

/// Returns whether the event was signalled since the last call.
fn fired(event: &EventFd) -> bool {
    let fired = event.is_signalled();
    event.clear();
    fired
}

#[test]
fn vectors_are_armed_triggered_masked_and_disarmed() {
    let mut client = ServeOutcome::simple().hold_client();
    let events = [EventFd::new().unwrap(), EventFd::new().unwrap()];
    let [one, two] = &events;
    assert_eq!(
        set(
            &mut client,
            (irq::MSIX, EVENTFD | TRIGGER, 3, 2),
            &[],
            &[one, two]
        ),
        0
    );
    assert!(!fired(one) && !fired(two));
    assert_eq!(
        set(&mut client, (irq::MSIX, NONE | TRIGGER, 3, 1), &[], &[]),
        0
    );
    assert!(fired(one) && !fired(two));
    assert_eq!(
        set(&mut client, (irq::MSIX, BOOL | TRIGGER, 3, 2), &[0, 1], &[]),
        0
    );
    assert!(!fired(one) && fired(two));
    // An interrupt that is raised while its vector is masked is pending, and fires once when it is
    // unmasked.
    assert_eq!(
        set(&mut client, (irq::MSIX, NONE | MASK, 4, 1), &[], &[]),
        0
    );
    assert_eq!(
        set(&mut client, (irq::MSIX, NONE | TRIGGER, 3, 2), &[], &[]),
        0
    );
    assert!(fired(one) && !fired(two));
    assert_eq!(
        client.read(4, 4096, 8).unwrap(),
        [1 << 4, 0, 0, 0, 0, 0, 0, 0]
    );
    assert_eq!(
        set(&mut client, (irq::MSIX, BOOL | UNMASK, 3, 2), &[1, 1], &[]),
        0
    );
    assert!(!fired(one) && fired(two));
    assert_eq!(client.read(4, 4096, 8).unwrap(), [0; 8]);
    // QEMU disarms one vector without descriptors, and all with a count of 0.
    assert_eq!(
        set(&mut client, (irq::MSIX, EVENTFD | TRIGGER, 3, 1), &[], &[]),
        0
    );
    assert_eq!(
        set(&mut client, (irq::MSIX, NONE | TRIGGER, 3, 1), &[], &[]),
        0
    );
    assert!(!fired(one));
    assert_eq!(
        set(&mut client, (irq::MSIX, NONE | TRIGGER, 0, 0), &[], &[]),
        0
    );
    assert_eq!(
        set(&mut client, (irq::MSIX, NONE | TRIGGER, 4, 1), &[], &[]),
        0
    );
    assert!(!fired(two));
}

#[test]
fn sets_that_make_no_sense_are_refused() {
    let mut client = ServeOutcome::simple().hold_client();
    let event = EventFd::new().unwrap();
    let cases: [(Set, &[u8], usize); 14] = [
        ((irq::MSIX, EVENTFD | TRIGGER, 64, 2), &[], 2),
        ((irq::MSIX, EVENTFD | TRIGGER, u32::MAX, 2), &[], 2),
        ((irq::MSIX, EVENTFD | TRIGGER, 0, 2), &[], 1),
        ((irq::MSIX, EVENTFD | TRIGGER, 0, 1), &[], 2),
        ((irq::MSIX, EVENTFD | MASK, 0, 1), &[], 1),
        ((irq::MSIX, EVENTFD | UNMASK, 0, 1), &[], 1),
        ((irq::MSIX, BOOL | TRIGGER, 0, 2), &[1], 0),
        ((irq::MSIX, NONE | TRIGGER, 0, 1), &[], 1),
        ((irq::MSIX, NONE, 0, 1), &[], 0),
        ((irq::MSIX, TRIGGER, 0, 1), &[], 0),
        ((irq::MSIX, NONE | BOOL | TRIGGER, 0, 1), &[1], 0),
        ((irq::MSIX, NONE | MASK | UNMASK, 0, 1), &[], 0),
        ((irq::MSI, NONE | TRIGGER, 0, 1), &[], 0),
        ((9, NONE | TRIGGER, 0, 0), &[], 0),
    ];
    for (i, (one, data, fds)) in cases.into_iter().enumerate() {
        let events = vec![&event; fds];
        // An index without interrupts has none to be disarmed; only unknown ones are an error.
        assert_eq!(set(&mut client, one, data, &events), INVAL, "case {i}");
    }
    // Only an eventfd can be signalled without waiting.
    let (mut reader, writer) = std::io::pipe().unwrap();
    let head = wire::IrqSet {
        argsz: 20,
        flags: EVENTFD | TRIGGER,
        index: irq::MSIX,
        start: 0,
        count: 1,
    };
    let refused = client.send(command::DEVICE_SET_IRQS, head.as_bytes(), &[writer.as_fd()]);
    assert_eq!(refused.err(), Some(INVAL));
    drop(writer);
    assert_eq!(
        reader.read(&mut [0]).unwrap(),
        0,
        "the server has closed its copy"
    );
}

#[test]
fn the_pin_masks_itself_and_is_asserted_again_while_its_cause_lasts() {
    let served = ServeOutcome::simple();
    let mut client = served.client();
    let mut driver = controller::Guest::new(&mut client);
    let event = EventFd::new().unwrap();
    assert_eq!(
        set(
            &mut client,
            (irq::INTX, EVENTFD | TRIGGER, 0, 1),
            &[],
            &[&event]
        ),
        0
    );
    driver.enable(&mut client);
    driver.submit(controller::identify());
    assert!(event.wait(Duration::from_secs(20)));
    event.clear();
    driver.submit(controller::identify());
    driver.wait(2);
    assert!(!fired(&event), "masked until the client says otherwise");
    assert_eq!(client.read(7, 6, 1).unwrap()[0] & 8, 8, "interrupt status");
    assert_eq!(
        set(&mut client, (irq::INTX, NONE | UNMASK, 0, 1), &[], &[]),
        0
    );
    assert!(fired(&event), "two completions wait");
    driver.consume(2);
    assert_eq!(
        set(&mut client, (irq::INTX, NONE | UNMASK, 0, 1), &[], &[]),
        0
    );
    assert!(!fired(&event));
    assert_eq!(client.read(7, 6, 1).unwrap()[0] & 8, 0);
    // INTMS and the command register hold the interrupt back; clearing them lets it through.
    client.write32(nvme_spec::register::offset::INTMS, 1);
    driver.submit(controller::identify());
    driver.wait(3);
    assert!(!fired(&event));
    client.write(7, 5, &[4]).unwrap();
    client.write32(nvme_spec::register::offset::INTMC, 1);
    assert!(!fired(&event));
    client.write(7, 5, &[0]).unwrap();
    assert!(fired(&event));
}

#[test]
fn the_pin_follows_its_level_at_the_time_of_the_interrupt() {
    let lines = InterruptLines::new(1);
    let event = EventFd::new().unwrap();
    let arm = wire::IrqSet {
        argsz: 20,
        flags: EVENTFD | TRIGGER,
        index: irq::INTX,
        start: 0,
        count: 1,
    };
    let fd = event.fd().try_clone_to_owned().unwrap();
    lines.set(arm, &[], vec![fd]).unwrap();
    lines.raise(0, false, &|| false);
    assert!(!fired(&event), "the driver has consumed the completions");
    lines.raise(0, false, &|| true);
    assert!(fired(&event));
    lines.raise(0, false, &|| true);
    assert!(!fired(&event), "masked until the client says otherwise");
}
