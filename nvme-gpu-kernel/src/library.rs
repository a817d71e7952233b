//! The shared queue for kernels in CUDA C++: functions with C linkage, declared in
//! `nvme-gpu-kernel/include/nvme_gpu_device.cuh`, where each is documented.
//!
//! Invariant: results are 0 or positive if the controller answered, negative otherwise; the numbers are the
//! header's.
// UNSAFETY: pointers come from CUDA C++ code, which vouches for them as the header requires.
#![allow(unsafe_code)]

use crate::arch;
use crate::rows::GatherLaunch;
use crate::table_rows::RowsCursor;
use crate::{GpuThread, QueueArray};
use nvme_core::group::ExecContext;
use nvme_core::spec::{Iova, Lba, Nsid, Sqe, nvm};
use nvme_core::{
    CommandData, CommandOutcome, CommandToken, DrainResult, MemberCommand, SharedQueue,
    SubmitError, WaitError,
};

const PENDING: i32 = -1;
const TIMED_OUT: i32 = -2;
// In the order of `SubmitError`, so that the compiler turns `refusal` into a subtraction instead of a table
// in memory.
const FULL: i32 = -3;
const BAD_DATA: i32 = -4;
const CELL_BUSY: i32 = -5;
const REFUSED: i32 = -6;
const ABORTED: i32 = -7;
const NO_QUEUE: i32 = -8;

/// Version of the structures below; the host compares it with its own.
#[unsafe(export_name = "nvme_gpu_device_layout")]
#[used]
static LAYOUT: u32 = crate::DEVICE_LAYOUT;

/// The header's `nvme_gpu_command`.
#[derive(Clone, Copy)]
#[repr(C)]
struct CommandWords {
    lba: u64,
    data: u64,
    pages: u64,
    bytes: u64,
    opcode: u32,
    nsid: u32,
    blocks: u32,
    flags: u32,
    cell: u32,
    reserved: u32,
}
const _: () = assert!(size_of::<CommandWords>() == 56);

/// The header's `nvme_gpu_token`.
#[repr(C)]
struct TokenWords {
    words: [u32; 3],
    queue: u32,
}
const _: () = assert!(size_of::<TokenWords>() == 16);

impl CommandWords {
    /// Makes the command, with its page table at any address.
    ///
    /// # Safety
    /// `pages`, when not 0, is a table of as many page addresses as the data touches.
    #[inline(always)]
    unsafe fn command<'d>(&self, page_bytes: u64) -> MemberCommand<'d> {
        let mut sqe = Sqe::new(self.opcode as u8, Nsid(self.nsid));
        if self.blocks != 0 {
            // Read, write, compare and write zeroes have their blocks in the same fields.
            let range = nvm::read(Nsid(self.nsid), Lba(self.lba), self.blocks);
            (sqe.cdw10, sqe.cdw11) = (range.cdw10, range.cdw11);
            sqe.cdw12 = range.cdw12 | self.flags;
        }
        let data = match (self.bytes, self.pages) {
            (0, _) => CommandData::None,
            (len, 0) => CommandData::Contiguous {
                iova: Iova(self.data),
                len,
            },
            (len, table) => {
                let count = (self.data + len + page_bytes - 1) >> page_bytes.trailing_zeros();
                // SAFETY: this function's caller vouches for the table and its length.
                let pages = unsafe {
                    core::slice::from_raw_parts(table as usize as *const Iova, count as usize)
                };
                CommandData::Pages {
                    offset: self.data,
                    len,
                    pages,
                }
            }
        };
        MemberCommand::new(sqe, data, self.cell)
    }
}

#[inline(always)]
fn refusal(error: SubmitError) -> i32 {
    match error {
        SubmitError::QueueFull => FULL,
        SubmitError::Map(_) => BAD_DATA,
        SubmitError::CellBusy => CELL_BUSY,
        SubmitError::Refused | SubmitError::Closed => REFUSED,
    }
}

#[inline(always)]
fn answer(outcome: CommandOutcome) -> i32 {
    match outcome {
        // A success may come with hints for a retry, which are no failure.
        CommandOutcome::Completed(status) if status.is_success() => 0,
        CommandOutcome::Completed(status) => i32::from(status.0),
        CommandOutcome::Aborted(_) => ABORTED,
    }
}

/// Attaches to a queue.
///
/// # Safety
/// The pointers are valid as the header requires.
#[inline(always)]
unsafe fn attach<'a>(queues: *const QueueArray, queue: u32) -> Option<SharedQueue<'a>> {
    // SAFETY: the caller vouches for the pointer and for the queues that it points to.
    unsafe { (*queues).shared(queue) }
}

/// Submits; see the header.
///
/// # Safety
/// The pointers are valid as the header requires.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvme_gpu_submit(
    queues: *const QueueArray,
    queue: u32,
    command: *const CommandWords,
    timeout_ns: u64,
    token: *mut TokenWords,
) -> i32 {
    // SAFETY: the caller vouches for the queues.
    let Some(shared) = (unsafe { attach(queues, queue) }) else {
        return NO_QUEUE;
    };
    // SAFETY: the caller vouches for the command and its page table.
    let command = unsafe { (*command).command((*queues).page_bytes(queue)) };
    let deadline_ns = arch::now_ns().saturating_add(timeout_ns);
    loop {
        // One attempt without a wait, then a call that drains: the compiler needs registers for only one of
        // the two at once.
        let error = match shared.submit(&GpuThread, command, 0) {
            Ok(submitted) => {
                let words = submitted.words();
                // SAFETY: the caller vouches for the token.
                unsafe { token.write(TokenWords { words, queue }) };
                return 0;
            }
            Err(error) => error,
        };
        if !matches!(error, SubmitError::QueueFull) || arch::now_ns() >= deadline_ns {
            return refusal(error);
        }
        // SAFETY: the caller vouches for the queues.
        if unsafe { nvme_gpu_drain(queues, queue) } <= 0 {
            GpuThread.pause(4);
        }
    }
}

/// Waits; see the header.
///
/// # Safety
/// The pointers are valid as the header requires.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvme_gpu_wait(
    queues: *const QueueArray,
    token: *const TokenWords,
    timeout_ns: u64,
) -> i32 {
    // SAFETY: the caller vouches for the token.
    let TokenWords { words, queue } = unsafe { token.read() };
    // SAFETY: the caller vouches for the queues.
    let Some(shared) = (unsafe { attach(queues, queue) }) else {
        return NO_QUEUE;
    };
    let deadline_ns = arch::now_ns().saturating_add(timeout_ns);
    match shared.wait(&GpuThread, CommandToken::from_words(words), deadline_ns) {
        Ok((outcome, _)) => answer(outcome),
        Err((WaitError::TimedOut, _)) => TIMED_OUT,
        Err((WaitError::Refused, _)) => REFUSED,
    }
}

/// Polls; see the header.
///
/// # Safety
/// The pointers are valid as the header requires.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvme_gpu_poll(queues: *const QueueArray, token: *const TokenWords) -> i32 {
    // SAFETY: the caller vouches for the token.
    let TokenWords { words, queue } = unsafe { token.read() };
    // SAFETY: the caller vouches for the queues.
    let Some(shared) = (unsafe { attach(queues, queue) }) else {
        return NO_QUEUE;
    };
    match shared.poll(&CommandToken::from_words(words)) {
        Some((outcome, _)) => answer(outcome),
        None if shared.fault().is_some() => REFUSED,
        None => PENDING,
    }
}

/// Drains; see the header.
///
/// # Safety
/// The pointers are valid as the header requires.
#[unsafe(no_mangle)]
#[inline(never)]
unsafe extern "C" fn nvme_gpu_drain(queues: *const QueueArray, queue: u32) -> i32 {
    // SAFETY: the caller vouches for the queues.
    let Some(shared) = (unsafe { attach(queues, queue) }) else {
        return NO_QUEUE;
    };
    match shared.help_out(&GpuThread) {
        DrainResult::Busy => PENDING,
        DrainResult::Took(count) => count as i32,
    }
}

/// The header's `nvme_gpu_rows_here`.
#[repr(C)]
struct HereWords {
    rows: *const GatherLaunch,
    here: RowsCursor,
}
const _: () = assert!(size_of::<HereWords>() == 24);

/// Enters; see the header.
///
/// # Safety
/// The pointers are valid as the header requires.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvme_gpu_rows_enter(rows: *const GatherLaunch, to: *mut HereWords) -> i32 {
    // SAFETY: the caller vouches for the table.
    let here = unsafe { RowsCursor::enter(&*rows) };
    let ends = here.ends;
    let words = HereWords { rows, here };
    // SAFETY: the caller vouches for the target.
    unsafe { to.write(words) };
    ends
}

/// Reads a row; see the header.
///
/// # Safety
/// The pointers are valid as the header requires.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvme_gpu_row(here: *mut HereWords, id: i64, bytes: *mut u64) -> i32 {
    // SAFETY: the caller vouches for the state that `nvme_gpu_rows_enter` wrote, which only this thread uses.
    let (words, rows) = unsafe { (&mut *here, &*(*here).rows) };
    // SAFETY: as above.
    let queue = unsafe { words.here.queue(rows) };
    match words.here.row(rows, queue.as_ref(), id) {
        Ok(address) => {
            // SAFETY: the caller vouches for the target.
            unsafe { bytes.write(address) };
            0
        }
        Err(code) => code,
    }
}

/// Leaves; see the header.
///
/// # Safety
/// The pointers are valid as the header requires.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvme_gpu_rows_leave(here: *mut HereWords) {
    // SAFETY: the caller vouches for the state that `nvme_gpu_rows_enter` wrote.
    let (here, rows) = unsafe { ((*here).here, &*(*here).rows) };
    here.leave(rows);
}
