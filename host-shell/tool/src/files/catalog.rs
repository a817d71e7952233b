//! `catalog`: lists the tensors of a file.

use super::{DriveArgs, volume};
use crate::common::output;
use clap::Args;
use nvme_host::catalog::{Catalog, MetadataValue as Meta, TensorEntry};
use nvme_host::files::FileLocation;
use nvme_host::{Result, units};
use serde_json::json;
use std::path::Path;

/// Values of an array that are printed for a person.
const SHOWN: usize = 8;

/// List the tensors of a file: safetensors, the index of several, GGUF, .npy
#[derive(Args)]
pub struct CatalogArgs {
    /// File of this machine, or DEVICE:/path
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    file: String,
    /// Print the header's keys, too
    #[arg(long, short = 'm')]
    metadata: bool,
    #[command(flatten)]
    drive: DriveArgs,
}

impl CatalogArgs {
    pub fn run(self) -> Result<()> {
        let catalog = match FileLocation::is_one(&self.file) {
            false => Catalog::of_file(Path::new(&self.file))?,
            true => {
                let location = FileLocation::parse(&self.file)?;
                let store = self.drive.store(&location)?;
                let volume = volume(&store, &location)?;
                volume.file(&location.path)?.catalog()?
            }
        };
        if self.drive.form.json {
            let metadata = self.metadata.then(|| catalog.metadata());
            return output::json(&json!({
                "format": catalog.format(),
                "bytes": catalog.bytes(),
                "metadata": metadata,
                "files": catalog.files(),
                "tensors": catalog.entries(),
            }));
        }
        let mut lines = Vec::new();
        if self.metadata {
            let values = catalog.metadata().iter();
            lines.extend(values.map(|(key, value)| format!("{key} = {}", of_value(value))));
        }
        lines.extend(catalog.entries().iter().map(of_entry));
        let bytes = catalog.entries().iter().map(|one| one.bytes).sum();
        lines.push(format!(
            "{} tensors, {} of data",
            catalog.entries().len(),
            units::bytes(bytes)
        ));
        output::print(&lines.join("\n"))
    }
}

fn of_entry(entry: &TensorEntry) -> String {
    let shape: Vec<String> = entry.shape.iter().map(u64::to_string).collect();
    format!(
        "{:<10} {:<20} {:>14} at {:>14} {}",
        entry.dtype.name(),
        format!("({})", shape.join(", ")),
        entry.bytes,
        entry.offset,
        entry.name
    )
}

fn of_value(value: &Meta) -> String {
    match value {
        Meta::Array(values) if values.len() > SHOWN => {
            let shown: Vec<String> = values.iter().take(SHOWN).map(of_value).collect();
            format!("[{}, ... {} values]", shown.join(", "), values.len())
        }
        value => serde_json::to_string(value).unwrap_or_default(),
    }
}
