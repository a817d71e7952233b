//! Plan of a run: the ranges that it reads.

use nvme_host::core::spec::Nsid;
use nvme_host::{Error, Result};

/// The lengths of a run, before the namespace bounds them.
#[derive(Clone, Copy, Debug)]
pub struct RunLengths {
    /// Bytes of the two sequential reads.
    pub sequential: [u64; 2],
    /// Layers, and bytes of each.
    pub layers: u64,
    pub layer_bytes: u64,
    /// Bytes of the table of rows, and rows of a gather.
    pub table_bytes: u64,
    pub rows: u64,
}

impl RunLengths {
    /// The milestones of gpu-nvme-direct: 669 MB and 8.6 GB at depth 32.
    pub const WHOLE: Self = Self {
        sequential: [669_000_000, 8_600_000_000],
        layers: 8,
        layer_bytes: 32 << 20,
        table_bytes: 256 << 20,
        rows: 65_536,
    };

    /// Lengths of a quick run: a tenth of the first read, and small ones otherwise.
    pub const QUICK: Self = Self {
        sequential: [66_900_000, 215_000_000],
        layers: 4,
        layer_bytes: 4 << 20,
        table_bytes: 16 << 20,
        rows: 4096,
    };
}

/// Bytes of a row of the gather.
pub const ROW_BYTES: u64 = 4096;
/// Commands in flight of a sequential read.
pub const DEPTH: u32 = 32;
/// Bytes of a command of a sequential read, if the controller moves them.
const COMMAND: u64 = 1 << 20;

/// The namespace, the range that may be read, and the length of commands.
#[derive(Clone, Copy, Debug)]
pub struct WitnessPlan {
    pub nsid: Nsid,
    pub block: u64,
    /// The first block.
    pub lba: u64,
    /// Bytes from there to the end of the namespace.
    pub bytes: u64,
    /// The longest transfer of one command.
    pub most: u64,
    pub sizes: RunLengths,
}

impl WitnessPlan {
    /// # Errors
    /// [`Error::Usage`] for a range that has no block.
    pub fn new(
        nsid: Nsid,
        (block, blocks): (u64, u64),
        lba: u64,
        most: u64,
        sizes: RunLengths,
    ) -> Result<Self> {
        let left = blocks.saturating_sub(lba);
        if left == 0 || block == 0 || most < block {
            return Err(Error::usage(
                format!("nothing can be read from LBA {lba} on: the namespace has {blocks} blocks"),
                "use a smaller --lba",
            ));
        }
        Ok(Self {
            nsid,
            block,
            lba,
            bytes: left.saturating_mul(block),
            most: most / block * block,
            sizes,
        })
    }

    /// Returns the length of a sequential read's commands: a power of two times the block.
    pub fn command(&self) -> u64 {
        let blocks = self.most.min(COMMAND) / self.block;
        self.block << blocks.checked_ilog2().unwrap_or(0)
    }

    /// Returns the length of the commands of the other way to the same bytes: a quarter, and a block at least.
    pub fn other_command(&self) -> u64 {
        (self.command() / 4).max(self.block)
    }

    /// Returns `bytes`, or as many as there are, in whole blocks.
    pub fn within(&self, bytes: u64) -> u64 {
        let bytes = bytes.min(self.bytes) / self.block * self.block;
        bytes.max(self.block)
    }

    /// Lengths of single commands: a block, a page, two pages and three (the shortest list), powers of two, and a block
    /// less than the most.
    pub fn lengths(&self) -> Vec<u64> {
        let most = self.within(self.most);
        let powers = (12..40).map(|power| 1u64 << power);
        let mut all: Vec<u64> = [
            self.block,
            8192,
            12_288,
            most.saturating_sub(self.block),
            most,
        ]
        .into_iter()
        .chain(powers)
        .filter(|bytes| *bytes >= self.block && *bytes <= most && bytes % self.block == 0)
        .collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Returns layers of equal length that fit: their number, and the bytes of each, which are whole pieces of `unit`
    /// if possible.
    pub fn layers(&self, unit: u64) -> (u64, u64) {
        let RunLengths {
            layers,
            layer_bytes,
            ..
        } = self.sizes;
        let each = layer_bytes.min(self.bytes / layers);
        match each / unit * unit {
            0 => (1, self.within(unit)),
            bytes => (layers, bytes),
        }
    }

    /// Returns the number of rows of the table that fits.
    pub fn table_rows(&self) -> u64 {
        self.sizes.table_bytes.min(self.bytes) / ROW_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(block: u64, blocks: u64, most: u64) -> WitnessPlan {
        WitnessPlan::new(Nsid(1), (block, blocks), 0, most, RunLengths::WHOLE).unwrap()
    }

    #[test]
    fn lengths_go_to_the_longest_transfer() {
        let large = plan(512, 1 << 40, 1 << 20);
        assert_eq!(large.command(), 1 << 20);
        assert_eq!(large.other_command(), 256 << 10);
        let lengths = large.lengths();
        assert!(lengths.starts_with(&[512, 4096, 8192, 12_288, 16_384]));
        assert!(lengths.ends_with(&[512 << 10, (1 << 20) - 512, 1 << 20]));
        // A controller that moves a page at most.
        let small = plan(4096, 1 << 30, 4096);
        assert_eq!((small.command(), small.other_command()), (4096, 4096));
        assert_eq!(small.lengths(), [4096]);
        assert_eq!(plan(4096, 1 << 30, 200 << 10).command(), 128 << 10);
    }

    #[test]
    fn a_small_namespace_is_read_as_far_as_it_goes() {
        let plan = plan(512, 100, 1 << 20);
        assert_eq!(plan.within(669_000_000), 51_200);
        assert_eq!(plan.lengths().last(), Some(&51_200));
        assert_eq!(plan.layers(64 << 10), (1, 51_200));
        assert_eq!(plan.table_rows(), 12);
        assert!(WitnessPlan::new(Nsid(1), (512, 100), 100, 1 << 20, RunLengths::QUICK).is_err());
        let one = self::plan(4096, 1, 1 << 20);
        assert_eq!((one.lengths(), one.layers(4096)), (vec![4096], (1, 4096)));
    }
}
