//! What moves the controller on: commands of a queue, and changes of its state.

pub(crate) mod batch;
pub(crate) mod lifecycle;
pub(crate) mod properties;
pub(crate) mod serve;
