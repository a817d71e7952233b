//! From the text of `--device` to a device.

use crate::device::Device;
use crate::error::{Error, Result};
use std::sync::Arc;

/// Opens the device that `text` names: `sim:PATH[?option=value&...]`, `sim:null`, `sim:mem`.
///
/// # Errors
/// [`Error::Usage`] for text that names none, [`Error::File`] for an image that cannot be opened.
pub fn open(text: &str) -> Result<Arc<dyn Device>> {
    let Some((kind, rest)) = text.split_once(':') else {
        return Err(Error::usage(
            format!("'{text}' names no device"),
            "write sim:PATH, sim:mem?size=1GiB or sim:null",
        ));
    };
    match kind {
        #[cfg(feature = "sim")]
        "sim" => Ok(crate::sim::open(rest)?),
        #[cfg(not(feature = "sim"))]
        "sim" => Err(Error::usage(
            "this build has no simulator",
            "build it with the feature `sim`",
        )),
        "vfio" | "vfio-user" | "kmod" => Err(Error::usage(
            format!("'{kind}:{rest}': this build has no {kind} devices"),
            "use a build that has them, or sim:PATH, sim:mem?size=1GiB or sim:null",
        )),
        _ => Err(Error::usage(
            format!("unknown kind of device '{kind}'"),
            "write sim:PATH, sim:mem?size=1GiB or sim:null",
        )),
    }
}
