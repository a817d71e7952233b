//! Positions in a ring. A position only grows; a doorbell carries it modulo the number of entries,
//! so a value alone is ambiguous and is resolved against the positions before and after it.

/// A ring of `entries` entries, whose positions count from its creation and never decrease.
#[derive(Clone, Copy, Debug)]
pub struct RingPositions {
    /// First address, if it is known and the ring is contiguous.
    pub base: Option<u64>,
    /// Number of entries, at least 1.
    pub entries: u32,
}

impl RingPositions {
    /// Returns the index of a position.
    pub fn index(self, position: u64) -> u32 {
        (position % u64::from(self.entries)) as u32
    }

    /// Returns the first position from `from` on that has this index (below `entries`).
    pub fn first_from(self, from: u64, index: u32) -> u64 {
        let entries = u64::from(self.entries);
        from + (u64::from(index) + entries - from % entries) % entries
    }

    /// Returns the last position up to `until` that has this index, if there is one.
    pub fn last_until(self, until: u64, index: u32) -> Option<u64> {
        let entries = u64::from(self.entries);
        until.checked_sub((until % entries + entries - u64::from(index)) % entries)
    }
}

#[cfg(test)]
mod tests {
    use super::RingPositions;

    #[test]
    fn an_index_names_the_next_or_the_last_position() {
        let ring = RingPositions {
            base: None,
            entries: 4,
        };
        assert_eq!(ring.first_from(0, 0), 0);
        assert_eq!(ring.first_from(1, 0), 4);
        assert_eq!(ring.first_from(7, 3), 7);
        assert_eq!(ring.last_until(7, 3), Some(7));
        assert_eq!(ring.last_until(6, 3), Some(3));
        assert_eq!(ring.last_until(2, 3), None);
    }
}
