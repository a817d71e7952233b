//! The reader beside images of mke2fs, odd ones of debugfs, broken ones, and another reader.

mod agrees;
mod broken;
mod huge;
mod image;
mod odd;
