//! Keys of a GGUF file, and the ones among them that a reader has used.

use nvme_host::catalog::MetadataValue;
use nvme_host::{Catalog, Error, Result};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

/// The keys of a file for one reader, which records the keys that it reads.
///
/// A key that changes the computation and that no code here reads would silently lead to other tokens.
/// [`Self::check_all_read`] finds such keys.
pub(crate) struct MetadataKeys<'a> {
    values: HashMap<&'a str, &'a MetadataValue>,
    read: RefCell<HashSet<&'a str>>,
    /// Makes the error of this reader out of its cause.
    refuse: fn(String) -> Error,
}

impl<'a> MetadataKeys<'a> {
    pub fn of(catalog: &'a Catalog, refuse: fn(String) -> Error) -> Self {
        let values = catalog.metadata().iter();
        Self {
            values: values.map(|(key, value)| (key.as_str(), value)).collect(),
            read: RefCell::default(),
            refuse,
        }
    }

    /// Returns the value of `name`.
    pub fn get(&self, name: &str) -> Option<&'a MetadataValue> {
        let (key, value) = self.values.get_key_value(name)?;
        self.read.borrow_mut().insert(key);
        Some(value)
    }

    /// Returns the text `name`.
    ///
    /// # Errors
    /// The reader's error for a value of another type.
    pub fn text(&self, name: &str) -> Result<Option<&'a str>> {
        self.typed(name, "a text", MetadataValue::as_text)
    }

    /// Returns the integer `name` from 0 on.
    ///
    /// # Errors
    /// The reader's error for a value of another type.
    pub fn integer(&self, name: &str) -> Result<Option<u64>> {
        self.typed(name, "an integer from 0 on", MetadataValue::as_u64)
    }

    /// Returns the number `name`, which is finite.
    ///
    /// # Errors
    /// The reader's error for a value of another type.
    pub fn number(&self, name: &str) -> Result<Option<f64>> {
        self.typed(name, "a finite number with a fraction", |value| {
            value.as_f64().filter(|number| number.is_finite())
        })
    }

    /// Returns the truth value `name`.
    ///
    /// # Errors
    /// The reader's error for a value of another type.
    pub fn flag(&self, name: &str) -> Result<Option<bool>> {
        self.typed(name, "true or false", |value| match value {
            MetadataValue::Bool(flag) => Some(*flag),
            _ => None,
        })
    }

    /// Returns the array `name`, each of its values converted by `element`.
    ///
    /// # Errors
    /// The reader's error for a value of another type, and for an element that `element` does not convert.
    pub fn array<T>(
        &self,
        name: &str,
        what: &str,
        element: impl Fn(&'a MetadataValue) -> Option<T>,
    ) -> Result<Option<Vec<T>>> {
        self.typed(name, what, |value| {
            value.as_array()?.iter().map(element).collect()
        })
    }

    fn typed<T>(
        &self,
        name: &str,
        what: &str,
        convert: impl FnOnce(&'a MetadataValue) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let converted = convert(value);
        let wrong = || (self.refuse)(format!("the value of the key {name} is not {what}"));
        converted.ok_or_else(wrong).map(Some)
    }

    /// Refuses the keys that begin with `prefix`, were not read, and are not among the `harmless` ones. A harmless key
    /// that ends with a dot stands for all that begin with it.
    ///
    /// # Errors
    /// The reader's error, with the first such key and its value.
    pub fn check_all_read(&self, prefix: &str, harmless: &[&str]) -> Result<()> {
        let read = self.read.borrow();
        let is_harmless = |key: &str| {
            let key = &key[prefix.len()..];
            harmless.iter().any(|known| match known.strip_suffix('.') {
                Some(family) => key.split('.').next() == Some(family),
                None => key == *known,
            })
        };
        let mut unread: Vec<&str> = self.values.keys().copied().collect();
        unread.retain(|key| key.starts_with(prefix) && !read.contains(key) && !is_harmless(key));
        unread.sort_unstable();
        match unread.first() {
            None => Ok(()),
            Some(key) => Err((self.refuse)(format!(
                "the key {key} ({}) is not known here and may change the result",
                shown(self.values[key])
            ))),
        }
    }
}

/// Returns the value as an error shows it.
fn shown(value: &MetadataValue) -> String {
    match value {
        MetadataValue::Text(text) => format!("'{}'", text.chars().take(40).collect::<String>()),
        MetadataValue::Array(values) => format!("an array of {}", values.len()),
        MetadataValue::Bytes(bytes) => format!("{} bytes", bytes.len()),
        MetadataValue::Bool(flag) => flag.to_string(),
        value => match (value.as_u64(), value.as_f64()) {
            (Some(integer), _) => integer.to_string(),
            (_, Some(number)) => number.to_string(),
            _ => "a negative integer".to_owned(),
        },
    }
}
