//! JSON objects that keep the order of their keys and reject duplicate keys.

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use std::collections::HashSet;
use std::fmt;

/// Pairs of a JSON object; a duplicate key is an error.
pub struct JsonPairs<T>(pub Vec<(String, T)>);

impl<T> Default for JsonPairs<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for JsonPairs<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader<T>(std::marker::PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Reader<T> {
            type Value = JsonPairs<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
                let mut pairs = Vec::new();
                let mut names = HashSet::new();
                while let Some((name, value)) = map.next_entry::<String, T>()? {
                    if !names.insert(name.clone()) {
                        return Err(M::Error::custom(format_args!("{name:?} is there twice")));
                    }
                    pairs.push((name, value));
                }
                Ok(JsonPairs(pairs))
            }
        }
        deserializer.deserialize_map(Reader(std::marker::PhantomData))
    }
}
