//! Look-ups by name among many.
//!
//! Names come from files that may be damaged or hostile. A linear search for each name would take minutes for a header
//! of a few megabytes.

/// Places of named things in the order of their names, for look-ups by bisection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NameIndex(Vec<usize>);

impl NameIndex {
    /// Builds an index of `names`, which are in the order of their positions. If names are equal, the first position
    /// comes first.
    pub fn of<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        let names: Vec<&str> = names.into_iter().collect();
        let mut places: Vec<usize> = (0..names.len()).collect();
        places.sort_by_key(|place| names[*place]);
        Self(places)
    }

    /// Returns the first place of a thing with this name. `name_of` gives the names that were indexed.
    pub fn find<'a>(&self, name_of: impl Fn(usize) -> &'a str, name: &str) -> Option<usize> {
        let at = self.0.partition_point(|place| name_of(*place) < name);
        let place = *self.0.get(at)?;
        (name_of(place) == name).then_some(place)
    }

    /// Returns the places of the things whose names begin with `prefix`, in the order of their names.
    pub fn with_prefix<'a>(&self, name_of: impl Fn(usize) -> &'a str, prefix: &str) -> &[usize] {
        let begin = self.0.partition_point(|place| name_of(*place) < prefix);
        let rest = &self.0[begin..];
        let count = rest.partition_point(|place| name_of(*place).starts_with(prefix));
        &rest[..count]
    }
}

#[cfg(test)]
mod tests {
    use super::NameIndex;
    use std::cell::Cell;

    #[test]
    fn names_are_found_and_of_equal_ones_the_first() {
        let names = ["b.1", "a", "b.10", "a", "b", "", "b.2"];
        let index = NameIndex::of(names);
        let find = |name: &str| index.find(|place| names[place], name);
        assert_eq!(
            (find("a"), find("b.10"), find("")),
            (Some(1), Some(2), Some(5))
        );
        assert_eq!((find("b.100"), find("c"), find("0")), (None, None, None));
        let with = |prefix: &str| index.with_prefix(|place| names[place], prefix);
        assert_eq!(with("b."), [0, 2, 6]);
        assert_eq!(with("b.1"), [0, 2]);
        assert!(with("c").is_empty());
        assert_eq!(with("").len(), names.len());
        assert_eq!(NameIndex::of([]).find(|_| "", "a"), None);
    }

    #[test]
    fn a_look_up_compares_few_of_many_names() {
        let names: Vec<String> = (0..200_000)
            .map(|one| format!("blk.{one}.weight"))
            .collect();
        let index = NameIndex::of(names.iter().map(String::as_str));
        let looks = Cell::new(0);
        let name_of = |place: usize| {
            looks.set(looks.get() + 1);
            names[place].as_str()
        };
        for (place, name) in names.iter().enumerate().step_by(1000) {
            assert_eq!(index.find(name_of, name), Some(place));
        }
        // 18 steps of bisection, and one comparison.
        assert!(looks.get() <= 200 * 20, "{}", looks.get());
    }
}
