//! The file that a run writes again after each rung, so that it is complete whenever the run ends.

use super::record::WitnessRecord;
use super::redact::{self, RedactedWords};
use crate::common::file::OutputFile;
use crate::common::images::CommandFiles;
use nvme_host::Result;
use serde_json::Value;
use std::path::{Path, PathBuf};

pub struct OutFile<'f> {
    path: PathBuf,
    files: &'f CommandFiles,
}

impl<'f> OutFile<'f> {
    /// Creates the file `path`, or a file in this folder whose name has the date. A given name must
    /// be free or a file.
    ///
    /// # Errors
    /// [`Error::File`](nvme_host::Error::File) if the file cannot be created; reported before anything is measured.
    pub fn create(path: Option<&Path>, date: &str, files: &'f CommandFiles) -> Result<Self> {
        let digits: String = date.chars().filter(char::is_ascii_digit).collect();
        let path = path.map_or_else(
            || PathBuf::from(format!("witness-{digits}.json")),
            PathBuf::from,
        );
        // The output is made and dropped as a test: the file does not exist afterwards, or is unchanged.
        drop(OutputFile::create(Some(&path), files)?);
        Ok(Self { path, files })
    }

    pub fn name(&self) -> String {
        self.path.display().to_string()
    }

    /// Replaces the file by `record`, and returns the written value.
    pub fn write(&mut self, record: &WitnessRecord, secrets: &RedactedWords) -> Result<Value> {
        let value = redact::clean(record, secrets)?;
        let text = crate::common::visible::json(&format!("{value:#}\n"));
        let mut out = OutputFile::create(Some(&self.path), self.files)?;
        out.write(text.as_bytes())?;
        out.commit()?;
        Ok(value)
    }
}
