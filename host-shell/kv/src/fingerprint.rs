//! What keys and values depend on besides the tokens, and keys of pages that contain it.

use crate::error::{KvError, Result};
use crate::key::PageKey;
use sha2::{Digest, Sha256};

/// Bytes that the text of one field may have.
pub const MOST_FIELD_BYTES: usize = 255;
/// Names of the fields, in the order in which they are stored.
pub(crate) const FIELDS: [&str; 9] = [
    "model",
    "revision",
    "dtype",
    "layout",
    "block_tokens",
    "parallel_rank",
    "group",
    "hash_algorithm",
    "seed",
];

/// The properties of a model and its server under which pages were computed. Pages of another fingerprint are never
/// found: it is in the superblock and in every key.
///
/// Texts have at most [`MOST_FIELD_BYTES`] bytes of UTF-8; an empty one is a value like any other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelFingerprint {
    /// Name of the model.
    pub model: String,
    /// Revision of its weights, as a commit or a hash.
    pub revision: String,
    /// Element type of the cache, as "bf16" or "fp8_e4m3".
    pub dtype: String,
    /// Order of a page's dimensions, as "blocks,heads,tokens,2*dim".
    pub layout: String,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Ranks and sizes of tensor and pipeline parallelism, as "tp 0 of 8, pp 0 of 1".
    pub parallel_rank: String,
    /// Number of the cache group of a hybrid model.
    pub group: u32,
    /// Algorithm of the caller's block hashes, as "sha256_cbor".
    pub hash_algorithm: String,
    /// Root of the caller's block hashes, as the value of PYTHONHASHSEED.
    pub seed: String,
}

impl ModelFingerprint {
    /// Returns the texts of the fields in the order of [`FIELDS`].
    fn texts(&self) -> [String; FIELDS.len()] {
        [
            self.model.clone(),
            self.revision.clone(),
            self.dtype.clone(),
            self.layout.clone(),
            self.block_tokens.to_string(),
            self.parallel_rank.clone(),
            self.group.to_string(),
            self.hash_algorithm.clone(),
            self.seed.clone(),
        ]
    }

    /// Returns the stored form: for each field its length in two bytes, little-endian, and its text.
    ///
    /// # Errors
    /// [`KvError::Usage`] for a text that is too long.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        for (name, text) in FIELDS.iter().zip(self.texts()) {
            if text.len() > MOST_FIELD_BYTES {
                return Err(KvError::usage(
                    format!(
                        "{name} of the fingerprint has {} bytes, and {MOST_FIELD_BYTES} is the limit",
                        text.len()
                    ),
                    "shorten it, or pass a hash of it",
                ));
            }
            bytes.extend((text.len() as u16).to_le_bytes());
            bytes.extend(text.as_bytes());
        }
        Ok(bytes)
    }

    /// Reads the stored form; `None` for bytes that [`encode`](Self::encode) does not make.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes;
        let mut next = || {
            let (length, tail) = rest.split_first_chunk::<2>()?;
            let length = usize::from(u16::from_le_bytes(*length));
            let (text, tail) = tail.split_at_checked(length)?;
            rest = tail;
            String::from_utf8(text.to_vec()).ok()
        };
        let fingerprint = Self {
            model: next()?,
            revision: next()?,
            dtype: next()?,
            layout: next()?,
            block_tokens: next()?.parse().ok()?,
            parallel_rank: next()?,
            group: next()?.parse().ok()?,
            hash_algorithm: next()?,
            seed: next()?,
        };
        // Also rejects bytes behind the last field, and numbers such as "+7".
        let again = fingerprint.encode().ok()?;
        (again == bytes).then_some(fingerprint)
    }

    /// Returns the first field that differs from `other`: its name, the value here, the value there.
    pub(crate) fn difference(&self, other: &Self) -> Option<(&'static str, String, String)> {
        let both = self.texts().into_iter().zip(other.texts());
        let mut fields = FIELDS.iter().zip(both);
        let (name, (here, there)) = fields.find(|(_, (here, there))| here != there)?;
        Some((name, here, there))
    }
}

/// The digest of a fingerprint, from which keys of pages are made.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct FingerprintDigest(pub(crate) [u8; 32]);

impl FingerprintDigest {
    /// Returns the digest of a fingerprint in its stored form, [`ModelFingerprint::encode`].
    pub fn of(encoded: &[u8]) -> Self {
        Self(Sha256::digest(encoded).into())
    }

    /// Returns the key of part `part` of the block that the caller knows by `block_hash`.
    pub fn key(&self, block_hash: &[u8], part: u32) -> PageKey {
        let hash = Sha256::new()
            .chain_update(self.0)
            .chain_update(part.to_le_bytes())
            .chain_update(block_hash)
            .finalize();
        let mut key = [0; PageKey::BYTES];
        key.copy_from_slice(&hash[..PageKey::BYTES]);
        PageKey(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn llama() -> ModelFingerprint {
        ModelFingerprint {
            model: "llama-3-8b".into(),
            revision: "1a2b".into(),
            dtype: "bf16".into(),
            layout: "blocks,2,tokens,heads,dim".into(),
            block_tokens: 16,
            parallel_rank: "tp 0 of 1".into(),
            group: 0,
            hash_algorithm: "sha256_cbor".into(),
            seed: "0".into(),
        }
    }

    /// Fingerprints that differ from `llama` in one field each.
    fn others() -> [ModelFingerprint; 9] {
        let text = |change: fn(&mut ModelFingerprint)| {
            let mut other = llama();
            change(&mut other);
            other
        };
        [
            text(|one| one.model.push('x')),
            text(|one| one.revision.clear()),
            text(|one| one.dtype = "fp8".into()),
            text(|one| one.layout = "blocks,heads,tokens,2*dim".into()),
            text(|one| one.block_tokens = 32),
            text(|one| one.parallel_rank = "tp 0 of 2".into()),
            text(|one| one.group = 1),
            text(|one| one.hash_algorithm = "xxhash".into()),
            text(|one| one.seed = "1".into()),
        ]
    }

    #[test]
    fn each_field_is_named_when_it_differs_and_changes_every_key() {
        let digest = |one: &ModelFingerprint| FingerprintDigest::of(&one.encode().unwrap());
        for (name, other) in FIELDS.iter().zip(others()) {
            let (field, here, there) = llama().difference(&other).unwrap();
            assert_eq!(field, *name);
            assert_ne!(here, there);
            assert_ne!(
                digest(&llama()).key(b"hash", 0),
                digest(&other).key(b"hash", 0)
            );
        }
        assert!(llama().difference(&llama()).is_none());
    }

    #[test]
    fn text_cannot_move_between_neighbouring_fields() {
        let mut other = llama();
        other.model = "llama-3-8b1a".into();
        other.revision = "2b".into();
        assert_ne!(other.encode().unwrap(), llama().encode().unwrap());
    }

    #[test]
    fn the_stored_form_is_read_back_and_nothing_else_is() {
        let bytes = llama().encode().unwrap();
        assert_eq!(ModelFingerprint::decode(&bytes), Some(llama()));
        for length in 0..bytes.len() {
            assert_eq!(ModelFingerprint::decode(&bytes[..length]), None);
        }
        let mut longer = bytes;
        longer.push(0);
        assert_eq!(ModelFingerprint::decode(&longer), None);
    }

    #[test]
    fn a_field_that_is_too_long_is_named() {
        let mut long = llama();
        long.layout = "x".repeat(MOST_FIELD_BYTES + 1);
        let error = long.encode().unwrap_err().to_string();
        assert_eq!(
            error,
            "layout of the fingerprint has 256 bytes, and 255 is the limit"
        );
    }

    #[test]
    fn parts_and_hashes_have_keys_of_their_own() {
        let digest = FingerprintDigest::of(&llama().encode().unwrap());
        assert_ne!(digest.key(b"a", 0), digest.key(b"a", 1));
        assert_ne!(digest.key(b"a", 0), digest.key(b"b", 0));
        assert_eq!(digest.key(b"a", 7).to_string().len(), 32);
    }
}
