//! The actions of the controller: it serves queues in batches of commands, executes register
//! writes, and changes its state by enable, reset, shutdown and loss of power.

pub(crate) mod batch;
pub(crate) mod lifecycle;
pub(crate) mod properties;
pub(crate) mod serve;
