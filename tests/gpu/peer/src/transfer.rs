//! Data between the driver's memory and the medium. Every lane of a warp calls with the same values.

use crate::command::{Move, PAGE, Work};
use crate::device::{
    LANES, ballot, copy_512, copy_page, lane, load32, load64, shuffle32, shuffle64, store32,
    sync_warp,
};
use crate::{Args, MDTS, is_reached};
use nvme_spec::Status;

/// Largest number of pages of one list: more pages mean that the list is circular.
const MOST_LISTS: u32 = 1 << MDTS;

/// Moves the data of each lane's command; the lane's status afterwards.
#[inline(always)]
pub fn all(args: &Args, work: &Work) -> u16 {
    let mut status = work.status;
    let small = work.is_small(args);
    let (to, from) = match work.how {
        Move::Read => (work.prp1, work.medium),
        _ => (work.medium, work.prp1),
    };
    let mut rest = ballot(small);
    while rest != 0 {
        eight(&mut rest, to, from);
    }
    let mut rest = ballot(work.how != Move::None && !small);
    while rest != 0 {
        let of = rest.trailing_zeros();
        rest &= rest - 1;
        let prps = [shuffle64(work.prp1, of), shuffle64(work.prp2, of)];
        let medium = shuffle64(work.medium, of);
        let how = shuffle32(work.how as u32, of);
        let ended = pages(args, how, prps, medium, shuffle32(work.bytes, of));
        if lane() == of {
            status = ended.0;
        }
    }
    status
}

/// Moves 512 bytes for each of the first eight lanes of `rest`, which they leave.
#[inline(always)]
fn eight(rest: &mut u32, to: u64, from: u64) {
    let mut there = 0;
    let mut next = |bit: u32| {
        let of = rest.trailing_zeros() & (LANES - 1);
        there |= u32::from(*rest != 0) << bit;
        *rest &= rest.wrapping_sub(1);
        (shuffle64(to, of), shuffle64(from, of))
    };
    // Four variables: an array that is filled in a loop would lie on the stack of the kernel.
    let (a, b, c, d) = (next(0), next(1), next(2), next(3));
    let (e, f, g, h) = (next(4), next(5), next(6), next(7));
    let to = [a.0, b.0, c.0, d.0, e.0, f.0, g.0, h.0];
    let from = [a.1, b.1, c.1, d.1, e.1, f.1, g.1, h.1];
    copy_512(to, from, there);
}

/// The pages of a command, one after the other.
struct Pages {
    /// Bytes after those of the page that was named last.
    rest: u32,
    /// PRP2, until it is used.
    prp2: Option<u64>,
    /// The entry of a list that comes next, and entries in its page from there on.
    at: u64,
    left: u32,
    /// Number of entries that lanes hold, the index of the next one, and this lane's entry.
    held: u32,
    index: u32,
    mine: u64,
    lists: u32,
}

impl Pages {
    /// Returns the next page, or why there is none.
    #[inline(always)]
    fn next(&mut self, args: &Args) -> Result<u64, Status> {
        if let Some(prp2) = self.prp2.take() {
            if u64::from(self.rest) <= PAGE {
                return Ok(prp2);
            }
            self.list(prp2);
        }
        loop {
            if self.index == self.held {
                self.fetch(args)?;
            }
            let entry = shuffle64(self.mine, self.index);
            self.index += 1;
            self.left -= 1;
            self.at += 8;
            if self.left > 0 || u64::from(self.rest) <= PAGE {
                return match entry.is_multiple_of(PAGE) {
                    true => Ok(entry),
                    false => Err(Status::INVALID_PRP_OFFSET),
                };
            }
            // The last entry of a list page names the next page if more entries follow.
            self.lists += 1;
            if !entry.is_multiple_of(8) || self.lists > MOST_LISTS {
                return Err(Status::INVALID_PRP_OFFSET);
            }
            self.list(entry);
        }
    }

    /// Goes on with the list at `at`.
    #[inline(always)]
    fn list(&mut self, at: u64) {
        self.at = at;
        self.left = (PAGE - at % PAGE) as u32 / 8;
        (self.held, self.index) = (0, 0);
    }

    /// Reads the next entries: lane k reads the k-th of them.
    #[inline(always)]
    fn fetch(&mut self, args: &Args) -> Result<(), Status> {
        let pages = self.rest.div_ceil(PAGE as u32);
        let count = pages.min(self.left).min(LANES);
        if !is_reached(args, self.at, u64::from(count) * 8) {
            return Err(Status::DATA_TRANSFER_ERROR);
        }
        self.mine = match lane() < count {
            true => load64(self.at + u64::from(lane()) * 8),
            false => 0,
        };
        (self.held, self.index) = (count, 0);
        Ok(())
    }
}

/// Moves `bytes` bytes between the pages that PRP1 and PRP2 name and the medium; `how` is a [`Move`].
#[inline(always)]
fn pages(args: &Args, how: u32, [prp1, prp2]: [u64; 2], mut medium: u64, bytes: u32) -> Status {
    if how == Move::Zero as u32 {
        zero(medium, bytes);
        return Status::SUCCESS;
    }
    let mut address = prp1;
    let mut part = bytes.min((PAGE - prp1 % PAGE) as u32);
    let mut pages = Pages {
        rest: bytes - part,
        prp2: Some(prp2),
        at: 0,
        left: 0,
        held: 0,
        index: 0,
        mine: 0,
        lists: 0,
    };
    loop {
        if !is_reached(args, address, u64::from(part)) {
            return Status::DATA_TRANSFER_ERROR;
        }
        if how != Move::Compare as u32 {
            let reads = how == Move::Read as u32;
            copy(
                if reads { address } else { medium },
                if reads { medium } else { address },
                part,
            );
        } else if !is_same(address, medium, part) {
            return Status::COMPARE_FAILURE;
        }
        medium += u64::from(part);
        if pages.rest == 0 {
            return Status::SUCCESS;
        }
        address = match pages.next(args) {
            Ok(address) => address,
            Err(status) => return status,
        };
        part = pages.rest.min(PAGE as u32);
        pages.rest -= part;
    }
}

/// Copies a multiple of 4 bytes, up to a page.
#[inline(always)]
fn copy(to: u64, from: u64, bytes: u32) {
    if (to | from).is_multiple_of(16) && bytes.is_multiple_of(512) {
        copy_page(to, from, bytes);
        return;
    }
    let mut at = lane() * 4;
    while at < bytes {
        store32(to + u64::from(at), load32(from + u64::from(at)));
        at += LANES * 4;
    }
}

#[inline(always)]
fn zero(to: u64, bytes: u32) {
    let mut at = lane() * 4;
    while at < bytes {
        store32(to + u64::from(at), 0);
        at += LANES * 4;
    }
}

#[inline(always)]
fn is_same(a: u64, b: u64, bytes: u32) -> bool {
    let (mut at, mut differs) = (lane() * 4, false);
    while at < bytes {
        differs |= load32(a + u64::from(at)) != load32(b + u64::from(at));
        at += LANES * 4;
    }
    sync_warp();
    ballot(differs) == 0
}
