//! Calls of a 32-bit program, made with the system call of such programs, which a 64-bit program can make, too.
// UNSAFETY: a system call by an instruction; its arguments lie in the low 4 GiB.
#![allow(unsafe_code)]

use super::node::{self, INFO, MAP, Node, PAGE, RESET};
use guest_tests::Outcome;
use std::arch::asm;

/// ioctl of 32-bit x86.
const IOCTL: u64 = 54;

fn call(node: &Node, number: u64, argument: u64) -> i64 {
    let result: i64;
    // SAFETY: the operands are the registers of this system call; rbx is saved, because the compiler reserves it.
    unsafe {
        asm!(
            "xchg rbx, {fd}",
            "int 0x80",
            "xchg rbx, {fd}",
            fd = inout(reg) node.fd() as u64 => _,
            inlateout("rax") IOCTL => result,
            in("rcx") number,
            in("rdx") argument,
            out("r8") _, out("r9") _, out("r10") _, out("r11") _,
        );
    }
    i64::from(result as i32)
}

/// INFO, MAP and RESET from a structure below 4 GiB.
pub fn run(address: &str) -> Outcome {
    let node = Node::opened(address)?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_32BIT | libc::MAP_POPULATE;
    let both = libc::PROT_READ | libc::PROT_WRITE;
    let low = node::mapped(2 * PAGE, both, flags, -1).map_err(|errno| format!("mmap: {errno}"))?;
    let words = low.cast::<u64>();
    let at = low as u64;
    let ask = |number, list: &[u64]| {
        for (index, word) in list.iter().enumerate() {
            // SAFETY: the access stays inside the two pages.
            unsafe { words.add(index).write_volatile(*word) };
        }
        call(&node, number, at)
    };
    let map = [48, at + PAGE as u64, PAGE as u64, 0, 1 << 32, at + 512];
    let ends = [
        ask(INFO, &[32, 0, 0, 0]),
        ask(MAP, &map),
        call(&node, RESET, 0),
    ];
    match ends {
        [0, 0, 0] => Ok(()),
        other => Err(format!("INFO, MAP and RESET of 32 bits: {other:?}")),
    }
}
