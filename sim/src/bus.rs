//! What a driver touches: properties, doorbells, queues, interrupts.

pub(crate) mod doorbell;
pub(crate) mod interrupt;
pub(crate) mod queue;
pub(crate) mod registers;
pub(crate) mod ring;
