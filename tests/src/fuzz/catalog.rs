//! Files of tensors are not trusted: a header is read or refused, and everything that it describes lies inside the
//! file.

use nvme_files::catalog::{Catalog, CatalogFormat, HeaderSource};

/// A file with these first bytes; the remaining bytes are zeros.
struct Padded<'a> {
    head: &'a [u8],
    len: u64,
    is_exact: bool,
}

impl HeaderSource for Padded<'_> {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, offset: u64, data: &mut [u8]) -> nvme_driver::Result<()> {
        let end = offset.checked_add(data.len() as u64);
        assert!(
            end.is_some_and(|end| end <= self.len),
            "a read past the end"
        );
        data.fill(0);
        let known = usize::try_from(offset)
            .ok()
            .and_then(|begin| self.head.get(begin..))
            .unwrap_or(&[]);
        let length = known.len().min(data.len());
        data[..length].copy_from_slice(&known[..length]);
        Ok(())
    }

    fn is_exact(&self) -> bool {
        self.is_exact
    }

    fn name(&self) -> String {
        "file".to_owned()
    }
}

/// The last two bytes choose what follows the other bytes: nothing, zeros, or a device.
pub fn catalog(bytes: &[u8]) {
    let Some((head, [kind, shift])) = bytes.split_last_chunk::<2>() else {
        return;
    };
    let len = head.len() as u64;
    let source = Padded {
        head,
        len: match kind % 3 {
            0 => len,
            1 => len + u64::from(*shift),
            _ => len + (1 << (shift % 63)),
        },
        is_exact: kind % 3 != 2,
    };
    match Catalog::of(&source) {
        Ok(found) => judge(&found, &source),
        Err(nvme_driver::Error::Usage { cause, remedy }) => {
            assert!(!cause.is_empty() && !remedy.is_empty());
        }
        Err(other) => panic!("{other}"),
    }
}

/// Reads the bytes as the part of a GGUF file after its first bytes.
pub fn gguf(bytes: &[u8]) {
    catalog(&[b"GGUF\x03\0\0\0", bytes].concat());
}

fn judge(found: &Catalog, source: &Padded<'_>) {
    assert!(found.bytes() <= source.len);
    assert!(!source.is_exact || found.bytes() == source.len);
    assert!(found.format() != CatalogFormat::Npy || found.entries().len() == 1);
    let mut end = 0;
    for entry in found.entries() {
        assert!(entry.offset >= end.max(2), "{} overlaps", entry.name);
        end = entry.offset + entry.bytes;
        let elements = entry.shape.iter().product::<u64>();
        assert_eq!(entry.dtype.bytes(elements), Some(entry.bytes));
    }
    assert!(end <= found.bytes());
}
