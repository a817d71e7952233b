//! Sums of bytes that come in any order, comparable between passes with commands of different lengths.

use super::record::VerifiedBytes;
use nvme_host::{Error, Result};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A pass over bytes in whole units.
#[derive(Clone, Debug)]
pub struct UnitDigest {
    salt: u64,
    unit: u64,
    sum: u64,
    units: u64,
    zero: u64,
    bytes: u64,
}

impl UnitDigest {
    /// Creates a digest. `salt` is not stored, so that the sums in a file reveal nothing about the content of a drive
    /// to someone who does not have the drive.
    pub fn new(salt: u64, unit: u64) -> Self {
        Self {
            salt,
            unit: unit.max(1),
            sum: 0,
            units: 0,
            zero: 0,
            bytes: 0,
        }
    }

    /// Takes `data`, which lies at `offset` of the range, a multiple of the unit; the last unit may be shorter.
    pub fn take(&mut self, offset: u64, data: &[u8]) {
        for (index, unit) in data.chunks(self.unit as usize).enumerate() {
            let number = offset / self.unit + index as u64;
            let seed = self.salt ^ number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
            self.sum = self.sum.wrapping_add(xxh3_64_with_seed(unit, seed));
            self.units += 1;
            self.zero += u64::from(unit.iter().all(|byte| *byte == 0));
            self.bytes += unit.len() as u64;
        }
    }

    /// Checks that both saw the same bytes. `how` names the two methods.
    ///
    /// # Errors
    /// [`Error::Mismatch`] where they differ.
    pub fn same(&self, other: &Self, how: impl Into<String>) -> Result<VerifiedBytes> {
        let how = how.into();
        if (self.sum, self.units, self.bytes) != (other.sum, other.units, other.bytes) {
            return Err(Error::Mismatch {
                what: format!("the sums differ: {how}"),
            });
        }
        Ok(VerifiedBytes {
            how,
            bytes: self.bytes,
            zero_share: self.zero_share(),
            sums: Some([self, other].map(|one| format!("{:016x}", one.sum))),
        })
    }

    /// Returns the share of units that are all zero.
    fn zero_share(&self) -> f64 {
        self.zero as f64 / self.units.max(1) as f64
    }
}

/// Returns the check of a step that compared `data` itself with the same bytes from elsewhere.
pub fn compared(data: &[u8], other: &[u8], how: &str) -> Result<VerifiedBytes> {
    let mut digest = UnitDigest::new(0, 4096);
    digest.take(0, data);
    if data != other {
        let at = data.iter().zip(other).position(|(one, other)| one != other);
        return Err(Error::Mismatch {
            what: format!(
                "byte {} differs: {how}",
                at.unwrap_or(data.len().min(other.len()))
            ),
        });
    }
    Ok(VerifiedBytes {
        how: how.to_owned(),
        bytes: data.len() as u64,
        zero_share: digest.zero_share(),
        sums: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_and_the_length_of_commands_do_not_matter() {
        let data: Vec<u8> = (0..10_000u32).map(|at| (at % 251) as u8).collect();
        let of = |salt, order: &[(usize, usize)]| {
            let mut digest = UnitDigest::new(salt, 1000);
            for (begin, end) in order {
                digest.take(*begin as u64, &data[*begin..*end]);
            }
            digest
        };
        let whole = of(7, &[(0, 10_000)]);
        let parts = of(7, &[(4000, 10_000), (0, 1000), (1000, 4000)]);
        let verified = whole.same(&parts, "x").unwrap();
        assert_eq!((verified.bytes, verified.zero_share), (10_000, 0.0));
        let [first, second] = verified.sums.unwrap();
        assert_eq!(first, second);
        assert_ne!(of(8, &[(0, 10_000)]).sum, whole.sum);
        assert!(of(7, &[(0, 9000)]).same(&whole, "x").is_err());
        // Units that change places are found.
        let mut swapped = UnitDigest::new(7, 1000);
        swapped.take(1000, &data[..1000]);
        swapped.take(0, &data[1000..2000]);
        swapped.take(2000, &data[2000..]);
        assert!(swapped.same(&whole, "x").is_err());
    }

    #[test]
    fn bytes_that_differ_are_named_and_zeroes_are_counted() {
        let mut data = vec![0; 8192];
        data[5000] = 1;
        let verified = compared(&data, &data, "x").unwrap();
        assert_eq!(verified.zero_share, 0.5);
        let error = compared(&data, &vec![0; 8192], "x").unwrap_err();
        assert_eq!(error.to_string(), "byte 5000 differs: x");
    }
}
