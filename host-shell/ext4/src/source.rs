//! The bytes of a device.

/// Error of a device's read.
pub type SourceError = Box<dyn std::error::Error + Send + Sync>;

/// The bytes of a device or partition.
pub trait VolumeSource {
    /// Returns the length in bytes.
    fn len(&self) -> u64;

    /// True if there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads `data.len()` bytes from byte `offset` on. The range lies inside of [`len`](Self::len).
    ///
    /// # Errors
    /// The errors of the device.
    fn read_at(&self, offset: u64, data: &mut [u8]) -> Result<(), SourceError>;
}

impl<S: VolumeSource + ?Sized> VolumeSource for &S {
    fn len(&self) -> u64 {
        S::len(self)
    }

    fn read_at(&self, offset: u64, data: &mut [u8]) -> Result<(), SourceError> {
        S::read_at(self, offset, data)
    }
}

impl VolumeSource for Vec<u8> {
    fn len(&self) -> u64 {
        Vec::len(self) as u64
    }

    fn read_at(&self, offset: u64, data: &mut [u8]) -> Result<(), SourceError> {
        let begin = usize::try_from(offset)?;
        let from = self.get(begin..).and_then(|from| from.get(..data.len()));
        data.copy_from_slice(from.ok_or("a read past the end")?);
        Ok(())
    }
}
