//! Read-ahead schedule of layers: the caller passes the order in which they are requested, or it is learned from the
//! first pass, which ends when its first layer is requested again.

use super::LayerOrder;
use nvme_driver::error::{Error, Result};
use std::collections::HashMap;

/// Read-ahead schedule: the next layers in the given or learned order.
#[derive(Debug)]
pub(super) struct ReadSchedule {
    layers: usize,
    /// One pass, which is repeated; `None` while it is learned.
    pass: Option<LayerSequence>,
    /// Layers of the first pass so far, while the order is learned.
    seen: Vec<usize>,
    /// Position of the last layer in the pass.
    place: Option<usize>,
}

/// Layers in their order, and the positions of each layer in it.
#[derive(Debug)]
struct LayerSequence {
    order: Vec<usize>,
    places: HashMap<usize, Vec<usize>>,
}

impl LayerSequence {
    fn new(order: Vec<usize>) -> Self {
        let mut places: HashMap<usize, Vec<usize>> = HashMap::new();
        for (place, layer) in order.iter().enumerate() {
            places.entry(*layer).or_default().push(place);
        }
        Self { order, places }
    }

    /// Returns the number of layers between position `from` and the next position of `layer`.
    fn distance(&self, from: usize, layer: usize) -> Option<usize> {
        let places = self.places.get(&layer)?;
        let next = places.partition_point(|place| *place < from);
        match places.get(next) {
            Some(place) => Some(place - from),
            None => Some(places.first()? + self.order.len() - from),
        }
    }
}

impl ReadSchedule {
    /// # Errors
    /// [`Error::Usage`] for an empty order, and for layers that do not exist.
    pub fn new(order: &LayerOrder, layers: usize) -> Result<Self> {
        let pass = match order {
            LayerOrder::Sequential => Some(LayerSequence::new((0..layers).collect())),
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
                Some(LayerSequence::new(pass.clone()))
            }
        };
        Ok(Self {
            layers,
            pass,
            seen: Vec::new(),
            place: None,
        })
    }

    /// Records a request for `layer`.
    pub fn asked(&mut self, layer: usize) {
        let Some(pass) = &self.pass else {
            if self.seen.first() == Some(&layer) {
                // The second pass begins.
                self.pass = Some(LayerSequence::new(std::mem::take(&mut self.seen)));
                self.place = Some(0);
            } else {
                self.seen.push(layer);
            }
            return;
        };
        // The schedule moves to the next position of the layer, counted from the one behind the last; it stays if the
        // layer is not in the order.
        let from = self.from(pass);
        if let Some(distance) = pass.distance(from, layer) {
            self.place = Some((from + distance) % pass.order.len());
        }
    }

    /// Returns the place behind the last one.
    fn from(&self, pass: &LayerSequence) -> usize {
        self.place.map_or(0, |place| (place + 1) % pass.order.len())
    }

    /// Returns the layer that comes `steps` layers after the next one, within one pass.
    pub fn ahead(&self, steps: usize) -> Option<usize> {
        match &self.pass {
            Some(pass) if steps < pass.order.len() => {
                Some(pass.order[(self.from(pass) + steps) % pass.order.len()])
            }
            Some(_) => None,
            None => {
                let next = self.next_in_sequence()?.checked_add(steps)?;
                (next < self.layers).then_some(next)
            }
        }
    }

    /// Returns how many layers come before `layer` does.
    pub fn distance(&self, layer: usize) -> Option<usize> {
        match &self.pass {
            Some(pass) => pass.distance(self.from(pass), layer),
            None => layer.checked_sub(self.next_in_sequence()?),
        }
    }

    /// Returns the next layer in sequence: as long as layers follow one another, that one is probably next.
    fn next_in_sequence(&self) -> Option<usize> {
        match self.seen[..] {
            [only] => Some(only + 1),
            [.., before, last] if last == before + 1 => Some(last + 1),
            _ => None,
        }
    }

    /// True if the order is known.
    pub fn is_known(&self) -> bool {
        self.pass.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(course: &ReadSchedule, count: usize) -> Vec<usize> {
        (0..count).map_while(|step| course.ahead(step)).collect()
    }

    #[test]
    fn a_sequence_begins_again_at_its_end() {
        let mut course = ReadSchedule::new(&LayerOrder::Sequential, 3).unwrap();
        assert_eq!(next(&course, 9), [0, 1, 2]);
        course.asked(1);
        assert_eq!(next(&course, 2), [2, 0]);
        course.asked(2);
        assert_eq!(next(&course, 2), [0, 1]);
        // If a layer is requested out of turn, the order continues after it.
        course.asked(1);
        assert_eq!(next(&course, 1), [2]);
    }

    #[test]
    fn a_layer_that_comes_twice_is_the_next_of_both() {
        let mut course = ReadSchedule::new(&LayerOrder::Given(vec![0, 1, 2, 1]), 4).unwrap();
        for (asked, then) in [(0, 1), (1, 2), (2, 1), (1, 0), (0, 1), (1, 2)] {
            course.asked(asked);
            assert_eq!(next(&course, 1), [then], "after {asked}");
        }
        // A layer that is not in the order changes nothing.
        course.asked(3);
        assert_eq!(next(&course, 1), [2]);
    }

    #[test]
    fn an_order_is_learned_from_the_first_pass() {
        let mut course = ReadSchedule::new(&LayerOrder::Learned, 6).unwrap();
        assert!(next(&course, 1).is_empty());
        for (asked, then) in [(3, &[4][..]), (4, &[5]), (1, &[]), (0, &[])] {
            course.asked(asked);
            assert_eq!(next(&course, 1), then, "after {asked}");
            assert_eq!(
                then.first().map(|layer| course.distance(*layer)),
                then.first().map(|_| Some(0))
            );
            assert!(!course.is_known());
        }
        course.asked(3);
        assert!(course.is_known());
        assert_eq!(next(&course, 9), [4, 1, 0, 3]);
        let distances = [4, 1, 0, 3, 5].map(|layer| course.distance(layer));
        assert_eq!(distances, [Some(0), Some(1), Some(2), Some(3), None]);
    }

    #[test]
    fn orders_that_cannot_be_are_refused() {
        for order in [vec![], vec![0, 3]] {
            let error = ReadSchedule::new(&LayerOrder::Given(order), 3).unwrap_err();
            assert!(matches!(error, Error::Usage { .. }));
        }
    }
}
