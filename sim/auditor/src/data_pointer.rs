//! Follows the data pointer of a command to the memory that it describes and to the lists that
//! describe it.
//!
//! Written from the specification's text, not after the simulator's or the driver's code: an error
//! in those must not repeat itself here.

use crate::buffers::AddressRange;
use crate::finding::Rule;
use alloc::vec::Vec;
use nvme_spec::sgl::{SglDescriptor, kind};
use nvme_spec::{PageSize, Psdt, Sqe};

/// Reads a word of memory as the device does; `None` if the device cannot read it.
pub type Memory<'a> = &'a dyn Fn(u64) -> Option<u64>;

/// Limit of the list words that are followed: more than any command of 65,536 blocks needs, and an
/// end for lists that point at themselves.
const MAX_WORDS: usize = 1 << 17;

/// Words of a PRP or SGL list at the time when the command was fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PointerList {
    /// Address of the first word.
    pub at: u64,
    /// The words.
    pub words: Vec<u64>,
}

impl PointerList {
    /// Returns the memory of the list.
    pub fn span(&self) -> AddressRange {
        AddressRange::new(self.at, self.words.len() as u64 * 8)
    }

    /// Returns the address after the last word.
    fn end(&self) -> u64 {
        self.at.wrapping_add(self.words.len() as u64 * 8)
    }

    /// Returns the address of the first word that differs from memory now.
    pub fn changed(&self, memory: Memory<'_>) -> Option<u64> {
        let at = |i: usize| self.at.wrapping_add(i as u64 * 8);
        let mut words = self.words.iter().enumerate();
        words
            .find(|(i, word)| memory(at(*i)).is_some_and(|now| now != **word))
            .map(|(i, _)| at(i))
    }
}

/// Memory and lists that a data pointer describes.
#[derive(Debug, Default)]
pub struct PointerWalk {
    /// Memory of the data; adjacent extents are joined.
    pub spans: Vec<AddressRange>,
    /// The lists.
    pub lists: Vec<PointerList>,
    /// The violated rule, and the value that violates it; nothing behind that value was followed.
    pub violation: Option<(Rule, u64)>,
    followed: usize,
}

type Step = Result<(), (Rule, u64)>;

impl PointerWalk {
    /// Follows the data pointer of `sqe` for `bytes` bytes.
    pub fn of(sqe: &Sqe, bytes: u64, page: PageSize, sgls: bool, memory: Memory<'_>) -> Self {
        let mut walk = Self::default();
        let result = match sqe.psdt() {
            Psdt::Prp => walk.prps(sqe.dptr, bytes, page.bytes(), memory),
            Psdt::SglMptrBuffer if sgls => walk.sgl(sqe.dptr, bytes, memory),
            _ => Err((Rule::SglDescriptor, u64::from(sqe.cdw0))),
        };
        walk.violation = result.err();
        walk
    }

    fn span(&mut self, start: u64, bytes: u64) {
        if let Some(last) = self.spans.last_mut()
            && last.end == start
        {
            last.end = start.saturating_add(bytes);
        } else {
            self.spans.push(AddressRange::new(start, bytes));
        }
    }

    /// Reads the word at `at` into the list that ends there, or into a new list.
    fn word(&mut self, at: u64, memory: Memory<'_>) -> Result<u64, (Rule, u64)> {
        self.followed += 1;
        let word = memory(at).filter(|_| self.followed <= MAX_WORDS);
        let word = word.ok_or((Rule::ListAbsent, at))?;
        match self.lists.last_mut() {
            Some(list) if list.end() == at => list.words.push(word),
            _ => self.lists.push(PointerList {
                at,
                words: Vec::from([word]),
            }),
        }
        Ok(word)
    }

    fn prps(&mut self, [prp1, prp2]: [u64; 2], bytes: u64, page: u64, memory: Memory<'_>) -> Step {
        // "PRP1: the offset shall be dword aligned." Address 0 counts as an error too: no operating
        // system maps memory for DMA there, so a zero is an entry that the driver has forgotten.
        if prp1 % 4 != 0 || prp1 == 0 {
            return Err((Rule::PrpEntry, prp1));
        }
        let first = (page - prp1 % page).min(bytes);
        self.span(prp1, first);
        let mut left = bytes - first;
        if left == 0 {
            return Ok(());
        }
        let whole_page = |entry: u64| match entry {
            0 => Err((Rule::PrpEntry, entry)),
            entry if entry % page != 0 => Err((Rule::PrpEntry, entry)),
            entry => Ok(entry),
        };
        if left <= page {
            let second = whole_page(prp2)?;
            self.span(second, left);
            return Ok(());
        }
        // More than one page remains, so PRP2 points to a list: it must be qword aligned, and the
        // list may start anywhere in its page and then ends with that page.
        if prp2 % 8 != 0 || prp2 == 0 {
            return Err((Rule::PrpEntry, prp2));
        }
        let mut at = prp2;
        while left > 0 {
            let entry = whole_page(self.word(at, memory)?)?;
            // "The last entry in a PRP list page is a pointer to the next list, when more is
            // needed": a page of data that fits exactly needs no chain, so its entry is data.
            if at % page == page - 8 && left > page {
                at = entry;
                continue;
            }
            let take = left.min(page);
            self.span(entry, take);
            left -= take;
            at = at.wrapping_add(8);
        }
        Ok(())
    }

    fn sgl(&mut self, words: [u64; 2], bytes: u64, memory: Memory<'_>) -> Step {
        let mut left = bytes;
        let descriptor = SglDescriptor::from_words(words);
        // The segment that is being read: its address, its number of descriptors, and whether it is
        // the last.
        let mut segment: Option<(u64, u64, bool)> = None;
        match descriptor.kind() {
            kind::DATA_BLOCK => self.block(descriptor, &mut left)?,
            kind::SEGMENT | kind::LAST_SEGMENT => segment = Some(segment_of(descriptor)?),
            _ => return Err((Rule::SglDescriptor, words[1])),
        }
        while let Some((at, count, last)) = segment.take() {
            for i in 0..count {
                let at = at.wrapping_add(i * 16);
                let lower = self.word(at, memory)?;
                let upper = self.word(at.wrapping_add(8), memory)?;
                let descriptor = SglDescriptor::from_words([lower, upper]);
                match descriptor.kind() {
                    kind::DATA_BLOCK => self.block(descriptor, &mut left)?,
                    kind::BIT_BUCKET => {
                        left = left.saturating_sub(u64::from(descriptor.length));
                    }
                    kind::SEGMENT | kind::LAST_SEGMENT if !last && i + 1 == count => {
                        segment = Some(segment_of(descriptor)?);
                    }
                    _ => return Err((Rule::SglDescriptor, upper)),
                }
            }
        }
        // A shorter SGL is always an error. A longer one is an error unless the SGLS field allows
        // it, and then only the command's length counts.
        if left == 0 {
            Ok(())
        } else {
            Err((Rule::SglDescriptor, left))
        }
    }

    fn block(&mut self, descriptor: SglDescriptor, left: &mut u64) -> Step {
        if descriptor.sub_type() != 0 {
            return Err((Rule::SglDescriptor, descriptor.to_words()[1]));
        }
        let take = u64::from(descriptor.length).min(*left);
        if take > 0 {
            self.span(descriptor.address, take);
        }
        *left -= take;
        Ok(())
    }
}

/// Returns the address of a segment, its number of descriptors, and whether it is the last one.
fn segment_of(descriptor: SglDescriptor) -> Result<(u64, u64, bool), (Rule, u64)> {
    let length = u64::from(descriptor.length);
    if descriptor.sub_type() != 0 || length == 0 || length % 16 != 0 {
        return Err((Rule::SglDescriptor, descriptor.to_words()[1]));
    }
    let last = descriptor.kind() == kind::LAST_SEGMENT;
    Ok((descriptor.address, length / 16, last))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvme_spec::{Lba, Nsid, nvm};

    fn memory(words: &[(u64, u64)]) -> impl Fn(u64) -> Option<u64> {
        let words = words.to_vec();
        move |at| {
            let found = words.iter().find(|(address, _)| *address == at);
            found.map(|(_, word)| *word)
        }
    }

    fn walk(prps: [u64; 2], bytes: u64, words: &[(u64, u64)]) -> PointerWalk {
        let sqe = nvm::read(Nsid(1), Lba(0), 1).with_prps(prps[0], prps[1]);
        PointerWalk::of(&sqe, bytes, PageSize::KIB4, false, &memory(words))
    }

    #[test]
    fn pieces_join_and_lists_are_kept() {
        let words = [
            (0x8FF0, 0x6000),
            (0x8FF8, 0xA000),
            (0xA000, 0x7000),
            (0xA008, 0x3000),
        ];
        let walk = walk([0x5800, 0x8FF0], 0x800 + 3 * 0x1000, &words);
        assert_eq!(walk.violation, None);
        assert_eq!(
            walk.spans,
            [
                AddressRange::new(0x5800, 0x2800),
                AddressRange::new(0x3000, 0x1000)
            ]
        );
        let list = |at, words: &[u64]| PointerList {
            at,
            words: words.to_vec(),
        };
        assert_eq!(
            walk.lists,
            [
                list(0x8FF0, &[0x6000, 0xA000]),
                list(0xA000, &[0x7000, 0x3000])
            ]
        );
    }

    #[test]
    fn every_offset_rule_of_prps_is_kept() {
        type Case = ([u64; 2], u64, &'static [(u64, u64)], Rule);
        let cases: [Case; 7] = [
            ([0x1002, 0], 512, &[], Rule::PrpEntry),
            ([0, 0], 512, &[], Rule::PrpEntry),
            ([0x1000, 0x2004], 8192, &[], Rule::PrpEntry),
            ([0x1000, 0], 8192, &[], Rule::PrpEntry),
            ([0x1000, 0x2004], 3 * 4096, &[], Rule::PrpEntry),
            (
                [0x1000, 0x2000],
                3 * 4096,
                &[(0x2000, 0x3008)],
                Rule::PrpEntry,
            ),
            ([0x1000, 0x2000], 3 * 4096, &[], Rule::ListAbsent),
        ];
        for (prps, bytes, words, rule) in cases {
            let violation = walk(prps, bytes, words).violation;
            assert_eq!(violation.map(|(rule, _)| rule), Some(rule), "{prps:x?}");
        }
        // A list that points at itself ends too.
        let circle = walk([0x1000, 0x2FF8], 1 << 24, &[(0x2FF8, 0x3000)]);
        assert!(circle.violation.is_some());
    }

    #[test]
    fn an_sgl_is_followed_from_segment_to_segment() {
        let block = |at, length| SglDescriptor::new(kind::DATA_BLOCK, at, length).to_words();
        let last = SglDescriptor::new(kind::LAST_SEGMENT, 0x9000, 16).to_words();
        let [a, b, c] = [block(0x1001, 500), last, block(0x5000, 12)];
        let words = [
            (0x8000, a[0]),
            (0x8008, a[1]),
            (0x8010, b[0]),
            (0x8018, b[1]),
            (0x9000, c[0]),
            (0x9008, c[1]),
        ];
        let first = SglDescriptor::new(kind::SEGMENT, 0x8000, 32).to_words();
        let sqe = nvm::read(Nsid(1), Lba(0), 1).with_sgl(first);
        let walk = PointerWalk::of(&sqe, 512, PageSize::KIB4, true, &memory(&words));
        assert_eq!(walk.violation, None);
        assert_eq!(
            walk.spans,
            [
                AddressRange::new(0x1001, 500),
                AddressRange::new(0x5000, 12)
            ]
        );
        let short = PointerWalk::of(&sqe, 513, PageSize::KIB4, true, &memory(&words));
        assert_eq!(short.violation, Some((Rule::SglDescriptor, 1)));
        let refused = PointerWalk::of(&sqe, 512, PageSize::KIB4, false, &memory(&words));
        assert!(refused.violation.is_some());
    }
}
