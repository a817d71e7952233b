//! The module's calls without the driver: malformed ones, and an opener that ignores events.
// UNSAFETY: a read of a mapped BAR.
#![allow(unsafe_code)]

use super::node::{self, MAP, Node, RESET, UNMAP};
use guest_tests::Outcome;
use nvme_units::SplitMix;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Bytes of the memory that calls may name.
const ARENA: usize = 1 << 20;
const PAGE: u64 = node::PAGE as u64;
/// Request codes of ioctl: the five calls of the module, then two codes that the module does not know.
const CALLS: [u64; 7] = [
    0xC020_4EE0,
    0xC030_4EE1,
    0x4008_4EE2,
    0x0000_4EE3,
    0x4008_4EE4,
    0x4008_4EE5,
    0,
];
/// Returns one of a list, by chance.
fn one_of<T: Copy>(dice: &mut SplitMix, list: &[T]) -> T {
    list[dice.below(list.len() as u64) as usize]
}

/// There are five calls. No other number is accepted, whatever direction and size it encodes, and no call of VFIO,
/// which would set interrupts or write configuration space.
fn no_others(node: &Node, memory: u64) -> Outcome {
    const TYPES: [u64; 2] = [b'N' as u64, b';' as u64];
    for number in 0..1 << 8 {
        for kind in TYPES {
            for size in [0, 4, 8, 16, 24, 32, 48] {
                for direction in 0..4 {
                    let call = direction << 30 | size << 16 | kind << 8 | number;
                    if CALLS[..5].contains(&call) {
                        continue;
                    }
                    match node.call(call, memory) {
                        Err(libc::ENOTTY) => {}
                        other => return Err(format!("call {call:#x}: {other:?}")),
                    }
                }
            }
        }
    }
    Ok(())
}

/// Makes calls of all kinds with right and wrong arguments for `seconds` seconds, then checks that everything was
/// released.
pub fn calls(address: &str, seconds: u64) -> Outcome {
    let node = Node::opened(address)?;
    let memory = node::arena(ARENA)? as u64;
    no_others(&node, memory)?;
    let mut dice = SplitMix::new(seconds);
    let mut handles = Vec::new();
    let mut ends: BTreeMap<(u64, i32), u64> = BTreeMap::new();
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(seconds) {
        let number = one_of(&mut dice, &CALLS);
        let size = one_of(&mut dice, &[32u64, 48, 8, 0, u64::from(u32::MAX)]);
        let kind = one_of(&mut dice, &[0u64, 0, 0, 1, 2, u64::from(u32::MAX)]);
        let random = dice.next_word();
        let pages = dice.next_word() % 300;
        let address = one_of(
            &mut dice,
            &[
                memory,
                memory + PAGE * (random % 300),
                memory + 1,
                0,
                PAGE,
                !0xFFF,
                random,
            ],
        );
        let bytes = one_of(&mut dice, &[PAGE * pages, 1, 0, 1 << 33, !0xFFF, random]);
        let fd = one_of(
            &mut dice,
            &[u64::from(u32::MAX), 0, 1, node.fd() as u64, 999],
        );
        let flags = one_of(&mut dice, &[0u64, 0, 0, 1, 2, u64::from(u32::MAX)]);
        let places = one_of(&mut dice, &[1u64, 16, 0, u64::from(u32::MAX)]);
        let list = one_of(&mut dice, &[memory, 0, !7, PAGE]);
        let mut argument = [0u64; 16];
        argument[0] = size | kind << 32;
        argument[1] = address;
        argument[2] = bytes;
        argument[3] = fd | flags << 32;
        argument[4] = places << 32;
        argument[5] = list;
        if number == UNMAP {
            let handle = handles.pop().unwrap_or(random as u32);
            argument[0] = one_of(&mut dice, &[8u64, 8, 8, 9]) | u64::from(handle) << 32;
        }
        // Good calls, which chance would rarely make.
        if number == MAP && dice.below(2) == 0 {
            argument[0] = 48;
            argument[1] = memory + PAGE * (1 + dice.below(200));
            argument[2] = PAGE * (1 + dice.below(50));
            argument[3] = 0;
            argument[4] = 16 << 32;
            argument[5] = memory;
        }
        // A reset takes a tenth of a second.
        if number == RESET && dice.below(50) > 0 {
            continue;
        }
        let end = node.call(number, argument.as_mut_ptr().expose_provenance() as u64);
        if number == MAP && end.is_ok() && handles.len() < 100 {
            handles.push(argument[4] as u32);
        }
        let code = end.err().unwrap_or(0);
        *ends.entry((number, code)).or_default() += 1;
    }
    println!("ends by call and errno: {ends:x?}");
    let succeeded = |number| ends.get(&(number, 0)).copied().unwrap_or(0);
    if succeeded(MAP) < 10 || succeeded(UNMAP) < 10 {
        return Err("too few calls were good ones".to_owned());
    }
    Ok(())
}

/// Opens the function, maps its registers, and holds both until the function is taken away.
pub fn deaf(address: &str) -> Outcome {
    let node = Node::opened(address)?;
    let bar = node
        .bar()
        .map_err(|errno| format!("mapping BAR 0: errno {errno}"))?;
    // SAFETY: the access stays inside the mapped page, or it is a SIGBUS, which ends this process.
    let first = unsafe { bar.cast::<u32>().wrapping_add(2).read_volatile() };
    println!("the controller is of version {first:#x}");
    let begin = Instant::now();
    loop {
        match node.info() {
            Ok(_) if begin.elapsed() < Duration::from_secs(30) => {}
            Ok(_) => return Err("the device was not taken away within 30 s".to_owned()),
            Err(libc::ENODEV) => break,
            Err(errno) => return Err(format!("INFO: errno {errno}")),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    println!("taken away after {} ms", begin.elapsed().as_millis());
    Ok(())
}
