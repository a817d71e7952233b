//! The text that names a file on a drive.

use nvme_driver::error::{Error, Result};

const REMEDY: &str = "write DEVICE:/path, as in vfio:0000:01:00.0?part=1:/models/model.gguf";

/// `DEVICE:/path`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileLocation {
    /// The device, without `part=`.
    pub device: String,
    /// The partition, from 1 on; the whole device without.
    pub part: Option<u32>,
    /// The path on the file system, from its root on.
    pub path: String,
}

impl FileLocation {
    /// True if `text` names a file on a drive: a device, `:/` and a path.
    pub fn is_one(text: &str) -> bool {
        split(text).is_some()
    }

    /// Parses `DEVICE:/path`. The path begins at the first `:/` after the name of the device; the device is
    /// written as for [`Store::open`](nvme_store::Store::open), with `part=N` among its options or after a separate
    /// `?`.
    ///
    /// # Errors
    /// [`Error::Usage`] for a text without a device or path, and for a partition that is no number from 1 on.
    pub fn parse(text: &str) -> Result<Self> {
        let Some((device, path)) = split(text) else {
            let cause = format!("'{text}' names no file on a drive");
            return Err(Error::usage(cause, REMEDY));
        };
        let (device, part) = partition(device)?;
        Ok(Self {
            device,
            part,
            path: path.to_owned(),
        })
    }
}

/// Returns the device and path.
fn split(text: &str) -> Option<(&str, &str)> {
    // The name of a file may itself begin with `/`.
    let scheme = match text.starts_with(['/', '.']) {
        true => 0,
        false => text.find(':')? + 1,
    };
    let colon = scheme + text[scheme..].find(":/")?;
    (colon > scheme).then(|| (&text[..colon], &text[colon + 1..]))
}

/// Takes `part=N` out of the options of a device.
fn partition(device: &str) -> Result<(String, Option<u32>)> {
    let Some((name, options)) = device.split_once('?') else {
        return Ok((device.to_owned(), None));
    };
    let (parts, others): (Vec<&str>, Vec<&str>) = options
        .split('&')
        .partition(|option| option.starts_with("part="));
    let device = match others.is_empty() {
        true => name.to_owned(),
        false => format!("{name}?{}", others.join("&")),
    };
    let [part] = parts[..] else {
        return match parts.is_empty() {
            true => Ok((device, None)),
            false => Err(Error::usage("part= is there twice", "name one partition")),
        };
    };
    let number = part["part=".len()..].parse().ok();
    match number.filter(|number| *number > 0) {
        Some(number) => Ok((device, Some(number))),
        None => Err(Error::usage(
            format!("'{part}' is no partition"),
            "write a number from 1 on, as in part=1",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::FileLocation;

    #[test]
    fn devices_and_paths_are_told_apart() {
        for (text, device, part, path) in [
            ("vfio:0000:01:00.0:/x", "vfio:0000:01:00.0", None, "/x"),
            ("vfio:01:00.0?part=3:/", "vfio:01:00.0", Some(3), "/"),
            ("sim:/tmp/a.img:/d/e f", "sim:/tmp/a.img", None, "/d/e f"),
            (
                "sim:a?part=1&size=1GiB:/x",
                "sim:a?size=1GiB",
                Some(1),
                "/x",
            ),
            (
                "sim:mem?size=1GiB&part=2:/x",
                "sim:mem?size=1GiB",
                Some(2),
                "/x",
            ),
            ("file:/tmp/a:/b:/c", "file:/tmp/a", None, "/b:/c"),
            ("/tmp/a.img:/b", "/tmp/a.img", None, "/b"),
            ("./a?part=1:/b", "./a", Some(1), "/b"),
            ("file:a?b:/c", "file:a?b", None, "/c"),
        ] {
            let expected = FileLocation {
                device: device.to_owned(),
                part,
                path: path.to_owned(),
            };
            assert_eq!(FileLocation::parse(text).unwrap(), expected, "{text}");
            assert!(FileLocation::is_one(text));
        }
        for text in [
            "",
            "/tmp/a",
            "file:/tmp/a",
            "a:b",
            "sim::/x",
            "model.gguf",
            "sim:a",
        ] {
            assert!(!FileLocation::is_one(text), "{text}");
            assert!(FileLocation::parse(text).is_err());
        }
        for part in [
            "part=0",
            "part=x",
            "part=",
            "part=-1",
            "part=1&part=2",
            "part=4294967296",
        ] {
            assert!(
                FileLocation::parse(&format!("sim:a?{part}:/x")).is_err(),
                "{part}"
            );
        }
    }
}
