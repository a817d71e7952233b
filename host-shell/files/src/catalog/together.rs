//! Several files of one model at once: the parts of a split GGUF are compared, and none may be missing.

use super::Catalog;
use super::source::{HeaderFault, HeaderSource};
use super::split::{self, JoinedParts, SplitPart};
use nvme_driver::error::{Error, Result};
use nvme_driver::words::listed;

/// Returns the parts that do not go together.
fn wrong(what: String) -> HeaderFault {
    HeaderFault::unknown(what, "name all parts of one model, in their order")
}

impl Catalog {
    /// Returns the tensors of each of several files of one model, at their offsets in that file.
    ///
    /// The parts of a split GGUF are named in their order, all of them.
    ///
    /// # Errors
    /// As [`of`](Self::of), with the name of the file; for parts of a split GGUF that are missing, in another order, of
    /// several models, or named together with a file that is no part.
    pub fn of_files(sources: &[&dyn HeaderSource]) -> Result<Vec<Self>> {
        let mut found = Vec::with_capacity(sources.len());
        let mut parts = Vec::with_capacity(sources.len());
        for source in sources {
            let catalog = Self::alone(*source)?;
            let part = SplitPart::of(&catalog);
            parts.push(part.map_err(|fault| split::wrong(fault).of(*source))?);
            found.push(catalog);
        }
        let Some(at) = parts.iter().position(Option::is_some) else {
            return Ok(found);
        };
        let first = match (parts[0], parts[at]) {
            (Some(first), _) if first.number == 0 => first,
            (_, Some(part)) => {
                let what = format!(
                    "it is part {} of {} of a split GGUF, and named {}",
                    part.number + 1,
                    part.count,
                    if at == 0 {
                        "first"
                    } else {
                        "behind a file that is no part"
                    }
                );
                return Err(wrong(what).of(sources[at]));
            }
            _ => return Err(Error::internal("a part that is none")),
        };
        let name = sources[0].label();
        let mut joined = JoinedParts::new(found[0].clone(), first, name, found[0].bytes());
        for (catalog, source) in found.iter().zip(sources).skip(1) {
            let fault = |what: String| wrong(what).of(*source);
            let offset = joined.next();
            let offset = offset.ok_or_else(|| fault("it is not among the parts".to_owned()))?;
            let added = joined.add(catalog.clone(), offset, source.label(), catalog.bytes());
            added.map_err(fault)?;
        }
        let missing = found.len() as u64 + 1..=first.count;
        if !missing.is_empty() {
            let what = format!(
                "{} of {} parts of the split GGUF are not named: {}",
                first.count - found.len() as u64,
                first.count,
                listed(missing.map(|number| format!("part {number}")))
            );
            return Err(wrong(what).of(sources[0]));
        }
        let all = joined.finish();
        all.map_err(|what| wrong(what).of(sources[0]))?;
        Ok(found)
    }
}
