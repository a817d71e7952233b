//! The lines that tests reach, of the libraries and of the Python package, and the tests of that package.

pub mod coverage;
pub mod python;
