//! Striping: several members as one range of bytes. The host and kernels find a byte's location by the same
//! code.

/// The layout of a striped range: a stripe of the first member, then of the second, and so on.
///
/// The last stripes of the members may be missing: the layout does not know the members' sizes, and callers
/// check the end of the range themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StripeLayout {
    size: StripeSize,
    members: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StripeSize {
    Bytes(u64),
    /// `1 << shift` bytes; stripe numbers have 32 bits.
    Shifted(u32),
}

/// The location of a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StripeLocation {
    /// Number of the stripe, counted over all members.
    pub stripe: u64,
    /// Member that holds it.
    pub member: u32,
    /// Offset of the byte in the member.
    pub offset: u64,
    /// Number of bytes from it to the end of the stripe.
    pub room: u64,
}

impl StripeLayout {
    /// Makes a layout; `None` for no members, or stripes of no bytes.
    pub const fn new(stripe_bytes: u64, members: u32) -> Option<Self> {
        if stripe_bytes == 0 || members == 0 {
            return None;
        }
        Some(Self {
            size: StripeSize::Bytes(stripe_bytes),
            members,
        })
    }

    /// Makes a layout with stripes of `1 << shift` bytes, fewer than 2^32 of them, which needs no 64-bit
    /// division: that takes a GPU long. `None` for no members, or a shift of 64 or more.
    #[inline(always)]
    pub const fn shifted(shift: u32, members: u32) -> Option<Self> {
        if shift >= u64::BITS || members == 0 {
            return None;
        }
        Some(Self {
            size: StripeSize::Shifted(shift),
            members,
        })
    }

    /// Returns the location of byte `at`.
    #[inline(always)]
    pub const fn spot(&self, at: u64) -> StripeLocation {
        // `new` and `shifted` refuse 0, so no divisor below is 0; the checked forms only keep the
        // panic paths out of kernels. A panic path would cost a kernel registers and a call to the
        // trap.
        match self.size {
            StripeSize::Bytes(bytes) => {
                let (stripe, within) = divided(at, bytes);
                // Stripes are dealt to the members in turn: the quotient is the stripe's number within its
                // member, the remainder is the member.
                let (row, member) = divided(stripe, self.members as u64);
                StripeLocation {
                    stripe,
                    // The remainder is below the number of members, which has 32 bits.
                    member: member as u32,
                    offset: row.wrapping_mul(bytes).wrapping_add(within),
                    room: bytes - within,
                }
            }
            StripeSize::Shifted(shift) => {
                let (stripe, within) = (at >> shift, at & ((1 << shift) - 1));
                let row = match (stripe as u32).checked_div(self.members) {
                    Some(row) => row,
                    None => 0,
                };
                StripeLocation {
                    stripe,
                    member: (stripe as u32).wrapping_sub(row.wrapping_mul(self.members)),
                    offset: (row as u64) << shift | within,
                    room: (1 << shift) - within,
                }
            }
        }
    }
}

#[inline(always)]
const fn divided(value: u64, by: u64) -> (u64, u64) {
    match value.checked_div(by) {
        Some(quotient) => (quotient, value.wrapping_sub(quotient.wrapping_mul(by))),
        None => (0, 0),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_byte_lies_in_one_place() {
        for (stripe_bytes, members) in [(4, 3), (512, 1), (6, 2), (1, 5)] {
            let stripes = StripeLayout::new(stripe_bytes, members).unwrap();
            let mut next = std::vec![0; members as usize];
            for at in 0..stripe_bytes * u64::from(members) * 3 {
                let spot = stripes.spot(at);
                // Each member is filled from its begin on, without a gap.
                let offset = &mut next[spot.member as usize];
                assert_eq!(spot.offset, *offset, "{at}");
                *offset += 1;
                assert_eq!(spot.stripe, at / stripe_bytes);
                assert_eq!(spot.room, stripe_bytes - at % stripe_bytes);
                assert_eq!(u64::from(spot.member), spot.stripe % u64::from(members));
            }
        }
    }

    #[test]
    fn a_shift_finds_what_a_division_does() {
        for (shift, members) in [(0, 3), (9, 1), (17, 8), (12, 5), (63, 2)] {
            let divides = StripeLayout::new(1 << shift, members).unwrap();
            let shifts = StripeLayout::shifted(shift, members).unwrap();
            for stripe in [0, 1, 7, 8, 9, 1000, u64::from(u32::MAX)] {
                for within in [0, 1, 511, (1u64 << shift) - 1] {
                    let Some(at) = stripe.checked_shl(shift).filter(|at| at >> shift == stripe)
                    else {
                        continue;
                    };
                    let at = at | within & ((1 << shift) - 1);
                    assert_eq!(shifts.spot(at), divides.spot(at), "{shift} {members} {at}");
                }
            }
        }
    }

    #[test]
    fn there_are_no_stripes_of_nothing() {
        assert_eq!(
            (StripeLayout::new(0, 2), StripeLayout::new(2, 0)),
            (None, None)
        );
        assert_eq!(
            (StripeLayout::shifted(64, 1), StripeLayout::shifted(9, 0)),
            (None, None)
        );
        let last = StripeLayout::new(u64::MAX, 1).unwrap().spot(u64::MAX);
        assert_eq!((last.stripe, last.offset), (1, u64::MAX));
    }
}
