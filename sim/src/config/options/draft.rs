//! The values of the options before stores are opened and the configuration is made. An error in a
//! later option must not leave an image file behind, so nothing is created while options are read.

use crate::config::settings::{Config, ConfigError};
use crate::medium::store::BlockStore;
use std::boxed::Box;
use std::format;
use std::string::String;
use std::vec::Vec;

pub(super) fn bad(option: &str, why: impl Into<String>) -> ConfigError {
    ConfigError {
        option: option.into(),
        why: why.into(),
        errno: None,
    }
}

/// Purpose for which images are opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageAccess {
    /// Commands may write. A missing image is created if `size` gives its length. No other process
    /// may have it open.
    Write,
    /// No command writes. As with `ro=on`, images are opened for reading, none is created, and
    /// other processes may read them at the same time.
    Read,
}

pub(super) type AnyStore = Box<dyn BlockStore + Send + Sync>;

/// Values of the options before anything is created from them.
pub(super) struct ConfigDraft {
    pub config: Config,
    pub size: Option<u64>,
    pub block: u32,
    pub count: u32,
    pub meta: u16,
    pub ro: bool,
    pub noiob: u16,
    pub read_ns: Option<u64>,
}

impl ConfigDraft {
    pub fn each(
        &self,
        make: impl Fn(u64) -> Result<AnyStore, ConfigError>,
        default: u64,
    ) -> Result<Vec<AnyStore>, ConfigError> {
        let bytes = self.size.unwrap_or(default);
        self.check_size(bytes)?;
        (0..self.count).map(|_| make(bytes)).collect()
    }

    pub fn check_size(&self, bytes: u64) -> Result<(), ConfigError> {
        let block = self.block;
        if bytes == 0 || !bytes.is_multiple_of(u64::from(block)) {
            let why = format!("must be a multiple of {block}, and not 0");
            return Err(bad("size", why));
        }
        Ok(())
    }
}
