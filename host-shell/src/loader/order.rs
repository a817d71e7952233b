//! The order in which layers are asked for: given, or learned from the first pass.

use super::LayerOrder;
use crate::error::{Error, Result};

/// Which layer comes next.
#[derive(Debug)]
pub(super) struct Course {
    layers: usize,
    /// One pass, after which it begins again; none while it is learned.
    pass: Option<Vec<usize>>,
    /// What the first pass has asked for so far.
    seen: Vec<usize>,
    /// Where the last layer stands in the pass.
    place: Option<usize>,
}

impl Course {
    /// # Errors
    /// [`Error::Usage`] for an empty order, and for layers that are not there.
    pub fn new(order: &LayerOrder, layers: usize) -> Result<Self> {
        let pass = match order {
            LayerOrder::Sequential => Some((0..layers).collect()),
            LayerOrder::Learned => None,
            LayerOrder::Given(pass) => {
                if let Some(wrong) = pass.iter().find(|one| **one >= layers) {
                    let cause = format!("the order has layer {wrong} of {layers}");
                    return Err(Error::usage(cause, "use numbers of layers, from 0 on"));
                }
                if pass.is_empty() {
                    return Err(Error::usage(
                        "the order has no layers",
                        "name them, or leave the order out",
                    ));
                }
                Some(pass.clone())
            }
        };
        Ok(Self {
            layers,
            pass,
            seen: Vec::new(),
            place: None,
        })
    }

    /// `layer` is asked for.
    pub fn asked(&mut self, layer: usize) {
        let Some(pass) = &self.pass else {
            if self.seen.first() == Some(&layer) {
                // The second pass begins.
                self.pass = Some(std::mem::take(&mut self.seen));
                self.place = Some(0);
            } else {
                self.seen.push(layer);
            }
            return;
        };
        // The next place that has it, from the one behind the last on; where it stays when there is none.
        let from = self.place.map_or(0, |place| place + 1);
        let places = (0..pass.len()).map(|step| (from + step) % pass.len());
        let found = places.into_iter().find(|place| pass[*place] == layer);
        self.place = found.or(self.place);
    }

    /// The layers after the last one that was asked for, one pass of them.
    pub fn next(&self) -> Vec<usize> {
        match &self.pass {
            Some(pass) => {
                let from = self.place.map_or(0, |place| place + 1);
                let places = (0..pass.len()).map(|step| (from + step) % pass.len());
                places.map(|place| pass[place]).collect()
            }
            // As long as layers follow one another, the next one probably does.
            None => match self.seen[..] {
                [only] => Self::after(only, self.layers),
                [.., before, last] if last == before + 1 => Self::after(last, self.layers),
                _ => Vec::new(),
            },
        }
    }

    fn after(layer: usize, layers: usize) -> Vec<usize> {
        (layer + 1..layers).collect()
    }

    /// Whether the order is known.
    pub fn is_known(&self) -> bool {
        self.pass.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(course: &Course, count: usize) -> Vec<usize> {
        course.next().into_iter().take(count).collect()
    }

    #[test]
    fn a_sequence_begins_again_at_its_end() {
        let mut course = Course::new(&LayerOrder::Sequential, 3).unwrap();
        assert_eq!(course.next(), [0, 1, 2]);
        course.asked(1);
        assert_eq!(next(&course, 2), [2, 0]);
        course.asked(2);
        assert_eq!(next(&course, 2), [0, 1]);
        // Out of turn: it goes on from there.
        course.asked(1);
        assert_eq!(next(&course, 1), [2]);
    }

    #[test]
    fn a_layer_that_comes_twice_is_the_next_of_both() {
        let mut course = Course::new(&LayerOrder::Given(vec![0, 1, 2, 1]), 4).unwrap();
        for (asked, then) in [(0, 1), (1, 2), (2, 1), (1, 0), (0, 1), (1, 2)] {
            course.asked(asked);
            assert_eq!(next(&course, 1), [then], "after {asked}");
        }
        // One that is not in the order changes nothing.
        course.asked(3);
        assert_eq!(next(&course, 1), [2]);
    }

    #[test]
    fn an_order_is_learned_from_the_first_pass() {
        let mut course = Course::new(&LayerOrder::Learned, 6).unwrap();
        assert!(course.next().is_empty());
        for (asked, then) in [(3, &[4][..]), (4, &[5]), (1, &[]), (0, &[])] {
            course.asked(asked);
            assert_eq!(next(&course, 1), then, "after {asked}");
            assert!(!course.is_known());
        }
        course.asked(3);
        assert!(course.is_known());
        assert_eq!(course.next(), [4, 1, 0, 3]);
    }

    #[test]
    fn orders_that_cannot_be_are_refused() {
        for order in [vec![], vec![0, 3]] {
            let error = Course::new(&LayerOrder::Given(order), 3).unwrap_err();
            assert!(matches!(error, Error::Usage { .. }));
        }
    }
}
