//! Numbers of a model's config.json.

use crate::LookupError;
use serde_json::{Map, Value};

/// A configuration, or a part of it.
pub struct ModelSettings<'a>(&'a Map<String, Value>);

/// Reads a configuration.
///
/// # Errors
/// [`LookupError::NotAnObject`] for another text.
pub fn parsed(text: &str) -> Result<Value, LookupError> {
    serde_json::from_str(text).map_err(|error| LookupError::NotAnObject(error.to_string()))
}

impl<'a> ModelSettings<'a> {
    /// Returns the settings in `value`, or in its member `inner` if it has one: the settings of the text part of a
    /// model.
    pub fn of(value: &'a Value, inner: &str) -> Result<Self, LookupError> {
        let whole = value
            .as_object()
            .ok_or_else(|| LookupError::NotAnObject(shortened(value)))?;
        match whole.get(inner) {
            None => Ok(Self(whole)),
            Some(part) => match part.as_object() {
                Some(part) => Ok(Self(part)),
                None => Err(bad(inner, part, "an object")),
            },
        }
    }

    fn value(&self, key: &str) -> Result<&'a Value, LookupError> {
        let found = self.0.get(key).filter(|value| !value.is_null());
        found.ok_or_else(|| LookupError::MissingKey(key.to_owned()))
    }

    /// Returns a number of `least..=most`.
    pub fn number(&self, key: &str, least: u64, most: u64) -> Result<u64, LookupError> {
        let value = self.value(key)?;
        number(value, least, most)
            .ok_or_else(|| bad(key, value, &format!("a whole number of {least} to {most}")))
    }

    /// Returns a number as [`number`](Self::number) does, or `usual` without the key.
    pub fn number_or(
        &self,
        key: &str,
        usual: u64,
        least: u64,
        most: u64,
    ) -> Result<u64, LookupError> {
        match self.value(key) {
            Err(_) => Ok(usual),
            Ok(_) => self.number(key, least, most),
        }
    }

    /// Returns a list of numbers of `least..=most`; one number alone is a list of one.
    pub fn numbers(&self, key: &str, least: u64, most: u64) -> Result<Vec<u64>, LookupError> {
        let value = self.value(key)?;
        let one = std::slice::from_ref(value);
        let values = value.as_array().map_or(one, Vec::as_slice);
        let numbers: Option<Vec<u64>> = values.iter().map(|one| number(one, least, most)).collect();
        numbers
            .filter(|numbers| !numbers.is_empty())
            .ok_or_else(|| bad(key, value, &format!("whole numbers of {least} to {most}")))
    }
}

fn number(value: &Value, least: u64, most: u64) -> Option<u64> {
    value
        .as_u64()
        .filter(|number| (least..=most).contains(number))
}

/// Returns the error of a value that breaks `rule`.
pub fn bad(key: &str, value: &Value, rule: &str) -> LookupError {
    LookupError::BadValue {
        key: key.to_owned(),
        value: shortened(value),
        rule: rule.to_owned(),
    }
}

/// Returns the value as JSON, without the end of a long one.
fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
