//! Manifests are not trusted: a manifest is read, or refused with the position of the fault, and
//! its chunks cover the file.

use nvme_driver::Error;
use nvme_files::Manifest;

/// The bytes are the text of a manifest.
pub fn manifest(bytes: &[u8]) {
    let read = match Manifest::parse(bytes) {
        Ok(read) => read,
        Err(Error::Usage { cause, remedy }) => {
            assert!(cause.starts_with("this is not a manifest: ") && !remedy.is_empty());
            return;
        }
        Err(other) => panic!("{other}"),
    };
    let mut end = 0;
    for chunk in read.chunks() {
        assert_eq!(chunk.offset, end, "chunks follow on each other");
        assert!(chunk.bytes > 0 && chunk.bytes <= read.chunk_bytes());
        end += u64::from(chunk.bytes);
        assert_eq!(read.cover(chunk.offset..end), chunk.offset..end);
        assert_eq!(read.cover(end - 1..end), chunk.offset..end);
    }
    assert_eq!(end, read.bytes());
    for part in read.parts() {
        let range = part.offset..part.offset + part.bytes;
        let chunks = read.chunks_of(range.clone());
        let chunks = chunks.unwrap_or_else(|error| panic!("a part: {error}"));
        let bytes: u64 = chunks.iter().map(|chunk| u64::from(chunk.bytes)).sum();
        assert_eq!(bytes, part.bytes);
        if part.bytes > 1 {
            assert!(read.chunks_of(range.start + 1..range.end).is_err());
        }
    }
    assert!(read.chunks_of(0..end + 1).is_err());
    let again = Manifest::parse(read.to_json().as_bytes());
    assert_eq!(again.ok(), Some(read));
}
