//! The shared memory of a block of lanes.

use std::any::Any;
use std::cell::RefCell;
use std::rc::Rc;

/// Content of shared memory when a block begins: a value that no kernel should rely on.
const UNWRITTEN: u128 = 0x5A5A_A5A5_5A5A_A5A5_5A5A_A5A5_5A5A_A5A5;

/// A `.shared` array and its name.
type NamedArray = (&'static str, Box<[u128]>);

/// The states of units that act for a block or a lane after the call, one of each type.
#[derive(Default)]
pub(crate) struct BlockUnits(RefCell<Vec<Rc<dyn Any>>>);

impl BlockUnits {
    /// Returns the state of type `T`, which is made when it is first asked for.
    pub fn of<T: Default + 'static>(&self) -> Rc<T> {
        let mut all = self.0.borrow_mut();
        let found = all.iter().find_map(|one| one.clone().downcast::<T>().ok());
        found.unwrap_or_else(|| {
            let new = Rc::new(T::default());
            all.push(new.clone());
            new
        })
    }
}

/// The shared memory of a block: its dynamic part, and the `.shared` arrays, made when a thread first
/// asks for it.
pub(crate) struct BlockArrays {
    named: RefCell<Vec<NamedArray>>,
    dynamic: RefCell<Box<[u128]>>,
    dynamic_bytes: u32,
    /// Units that act for the block.
    pub units: BlockUnits,
}

impl BlockArrays {
    /// Makes the shared memory of a block that has `dynamic_bytes` bytes of dynamic shared memory.
    pub fn new(dynamic_bytes: u32) -> Self {
        Self {
            named: RefCell::default(),
            dynamic: RefCell::new(vec![UNWRITTEN; dynamic_bytes.div_ceil(16) as usize].into()),
            dynamic_bytes,
            units: BlockUnits::default(),
        }
    }

    /// Returns the address of the dynamic part, a multiple of 16, and its length.
    pub fn dynamic(&self) -> (u64, u32) {
        let address = self.dynamic.borrow_mut().as_mut_ptr().expose_provenance();
        (address as u64, self.dynamic_bytes)
    }

    /// Returns the address of the array `name`, a multiple of 16.
    ///
    /// # Panics
    /// When the array is there with another length.
    pub fn array(&self, name: &'static str, bytes: u32) -> u64 {
        let mut arrays = self.named.borrow_mut();
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
