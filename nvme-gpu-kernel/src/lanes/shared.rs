//! The shared memory of a block of lanes.

use std::cell::RefCell;

/// Content of shared memory when a block begins: no kernel may count on it.
const UNWRITTEN: u128 = 0x5A5A_A5A5_5A5A_A5A5_5A5A_A5A5_5A5A_A5A5;

/// A `.shared` array and its name.
type NamedArray = (&'static str, Box<[u128]>);

/// The `.shared` arrays of a block; each is made when a thread first asks for it.
#[derive(Default)]
pub(crate) struct BlockArrays(RefCell<Vec<NamedArray>>);

impl BlockArrays {
    /// Returns the address of the array `name`, a multiple of 16.
    ///
    /// # Panics
    /// When the array is there with another length.
    pub fn array(&self, name: &'static str, bytes: u32) -> u64 {
        let mut arrays = self.0.borrow_mut();
        let units = bytes.div_ceil(16) as usize;
        let at = arrays.iter().position(|(of, _)| *of == name);
        let at = at.unwrap_or_else(|| {
            arrays.push((name, vec![UNWRITTEN; units].into_boxed_slice()));
            arrays.len() - 1
        });
        let array = &mut arrays[at].1;
        assert_eq!(array.len(), units, "two lengths of the shared array {name}");
        array.as_mut_ptr().expose_provenance() as u64
    }
}
