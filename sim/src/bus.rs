//! The side of the controller that a driver sees: properties, doorbells, queues and interrupts.
//! These modules keep values and positions and check them; the effects of a write are in `engine`.

pub(crate) mod doorbell;
pub(crate) mod interrupt;
pub(crate) mod queue;
pub(crate) mod registers;
pub(crate) mod ring;
