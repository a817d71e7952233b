//! Memory of the host as numbers, for computations on threads of the pool; launches without the GIL.
// UNSAFETY: numbers lie in memory of views, which are kept until a computation has ended.
#![allow(unsafe_code)]

use super::threads;
use crate::error::{ExceptionParts, OrRaise};
use crate::operation::PyOperation;
use crate::view::{MemoryPiece, PyView};
use pyo3::prelude::*;
use std::marker::PhantomData;

/// Number types for which every bit pattern is a valid value.
pub trait PlainNumber: Copy + Send + 'static {}
impl PlainNumber for u8 {}
impl PlainNumber for u16 {}
impl PlainNumber for i32 {}
impl PlainNumber for u32 {}
impl PlainNumber for i64 {}
impl PlainNumber for f32 {}

/// Numbers that are read.
pub struct InputNumbers<T> {
    memory: MemoryPiece,
    _number: PhantomData<T>,
}

/// Numbers that are written.
pub struct OutputNumbers<T> {
    memory: MemoryPiece,
    _number: PhantomData<T>,
}

impl<T: PlainNumber> InputNumbers<T> {
    /// Returns the numbers.
    ///
    /// # Safety
    /// Inside of the work of the [`HostCall`] that made this, or while that lives.
    pub unsafe fn get<'a>(&self) -> &'a [T] {
        match self.memory.bytes {
            0 => &[],
            // SAFETY: aligned, and kept, as the call saw to.
            bytes => unsafe {
                let first = self.memory.address as usize as *const T;
                std::slice::from_raw_parts(first, bytes / size_of::<T>())
            },
        }
    }
}

impl<T: PlainNumber> OutputNumbers<T> {
    /// Returns the numbers.
    ///
    /// # Safety
    /// As [`InputNumbers::get`], once.
    pub unsafe fn get<'a>(&self) -> &'a mut [T] {
        match self.memory.bytes {
            0 => &mut [],
            // SAFETY: aligned, kept, and apart from all else, as the call saw to.
            bytes => unsafe {
                let first = self.memory.address as usize as *mut T;
                std::slice::from_raw_parts_mut(first, bytes / size_of::<T>())
            },
        }
    }
}

/// A computation: its inputs and outputs.
#[derive(Default)]
pub struct HostCall {
    views: Vec<Py<PyView>>,
    inputs: Vec<MemoryPiece>,
    outputs: Vec<MemoryPiece>,
}

impl HostCall {
    fn numbers<T: PlainNumber>(
        &mut self,
        view: Py<PyView>,
        what: &str,
        is_out: bool,
    ) -> PyResult<MemoryPiece> {
        let memory = view.get().of_host(what, is_out)?;
        let size = size_of::<T>();
        let is_whole = memory.bytes.is_multiple_of(size);
        if !is_whole || memory.bytes > 0 && !memory.address.is_multiple_of(size as u64) {
            return Err(ExceptionParts::usage(
                format!(
                    "{what}: {} bytes at {:#x} are no numbers of {size} bytes",
                    memory.bytes, memory.address
                ),
                "use memory that is aligned, such as a copy",
            )
            .into());
        }
        self.views.push(view);
        Ok(memory)
    }

    /// Takes numbers that are read.
    ///
    /// # Errors
    /// For memory of a GPU, and numbers that are not aligned.
    pub fn input<T: PlainNumber>(
        &mut self,
        view: Py<PyView>,
        what: &str,
    ) -> PyResult<InputNumbers<T>> {
        let memory = self.numbers::<T>(view, what, false)?;
        self.inputs.push(memory);
        Ok(InputNumbers {
            memory,
            _number: PhantomData,
        })
    }

    /// Takes numbers that are written.
    ///
    /// # Errors
    /// As [`input`](Self::input), and for read-only memory.
    pub fn output<T: PlainNumber>(
        &mut self,
        view: Py<PyView>,
        what: &str,
    ) -> PyResult<OutputNumbers<T>> {
        let memory = self.numbers::<T>(view, what, true)?;
        self.outputs.push(memory);
        Ok(OutputNumbers {
            memory,
            _number: PhantomData,
        })
    }

    /// Takes an input that may be the same memory as `out`: `None` means that it is.
    ///
    /// # Errors
    /// As [`input`](Self::input).
    pub fn input_or_same<T: PlainNumber>(
        &mut self,
        view: Py<PyView>,
        what: &str,
        out: &OutputNumbers<T>,
    ) -> PyResult<Option<InputNumbers<T>>> {
        let memory = view.get().memory();
        let is_same = (memory.address, memory.bytes) == (out.memory.address, out.memory.bytes);
        match is_same {
            true => Ok(None),
            false => Ok(Some(self.input(view, what)?)),
        }
    }

    /// Computes by the threads of this process.
    ///
    /// # Errors
    /// For numbers that are written and have another use, too.
    pub fn start(
        self,
        work: impl FnOnce() -> nvme_host::Result<()> + Send + 'static,
    ) -> PyResult<PyOperation> {
        for (at, out) in self.outputs.iter().enumerate() {
            let others = self.inputs.iter().chain(&self.outputs[at + 1..]);
            if others.into_iter().any(|other| out.overlaps(*other)) {
                let cause = "an output shares memory with an input, or with another output";
                let remedy = "use separate memory for each";
                return Err(ExceptionParts::usage(cause, remedy).into());
            }
        }
        PyOperation::start(self.views, move || Ok(threads::run(work)??))
    }
}

/// Returns the launches without the GIL: a full stream makes a launch wait.
///
/// # Errors
/// Those of `launch`.
pub fn launch(
    py: Python<'_>,
    launch: impl FnOnce() -> nvme_host::Result<()> + Send,
) -> PyResult<()> {
    py.detach(launch).or_raise()
}

/// Converts `counts`, whose largest value may be `most`.
///
/// # Errors
/// The first that is negative or larger.
pub fn whole(what: &str, counts: &[i32], most: u32) -> nvme_host::Result<Vec<u32>> {
    let each = counts.iter().enumerate().map(|(at, count)| {
        let found = u32::try_from(*count).ok().filter(|count| *count <= most);
        found.ok_or_else(|| {
            let cause = format!("{what}[{at}] of the flattened counts is {count}");
            nvme_host::Error::usage(cause, format!("use 0 to {most}"))
        })
    });
    each.collect()
}

/// Runs `work` with bytes that are read and numbers that are written.
///
/// # Errors
/// As [`HostCall::input`] and [`HostCall::output`].
pub fn converted(
    from: Py<PyView>,
    out: Py<PyView>,
    work: impl FnOnce(&[u8], &mut [f32]) -> nvme_host::Result<()> + Send + 'static,
) -> PyResult<PyOperation> {
    let mut call = HostCall::default();
    let from = call.input::<u8>(from, "memory")?;
    let out = call.output::<f32>(out, "out")?;
    call.start(move || {
        // SAFETY: inside of the call, once.
        let (from, out) = unsafe { (from.get(), out.get()) };
        work(from, out)
    })
}
