//! Test support: the driver core and the simulated controller in one thread.
