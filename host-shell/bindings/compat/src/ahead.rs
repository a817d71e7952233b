//! Reads ahead of calls for layers: the first pass over them shows their order.
// UNSAFETY: layers go to memory that C vouches for.
#![allow(unsafe_code)]

use nvme_gpu_capi::border::Answer;
use nvme_gpu_capi::memory::{CallLocation, CallMemory, place};
use nvme_gpu_capi::opened::OpenedStore;
use nvme_host::loader::{LayerLoader, LayerMemory, LoadedLayer, LoaderOptions, ModelLayers};
use nvme_host::lock::lock;
use std::ffi::c_void;
use std::ops::Range;
use std::sync::Mutex;
use std::time::Duration;

/// Longer than any read.
const PATIENCE: Duration = Duration::from_secs(3600);

/// The passes over the layers of one loader.
pub struct LoaderPasses {
    slots: usize,
    state: Mutex<PassState>,
}

#[derive(Default)]
struct PassState {
    /// The layers of the first pass, in their order.
    pass: Vec<Range<u64>>,
    loader: Option<(LayerLoader, CallLocation)>,
    /// The store's mark of writes from before the first read of the loader.
    mark: u64,
    /// True if there is no memory to read ahead.
    is_off: bool,
}

impl LoaderPasses {
    /// Allocates memory for `slots` layers.
    pub fn new(slots: usize) -> Self {
        Self {
            slots,
            state: Mutex::default(),
        }
    }

    /// Fills `dst` with a layer of a known pass; returns false if the layer was not read ahead.
    ///
    /// # Safety
    /// `bytes` bytes at `dst` are valid for writes, and nothing else uses them meanwhile.
    pub unsafe fn load(
        &self,
        opened: &OpenedStore,
        offset: u64,
        dst: *mut c_void,
        bytes: usize,
    ) -> Answer<bool> {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        let to = unsafe { CallMemory::new(dst, bytes, "dst") }?;
        let range = offset..offset.saturating_add(bytes as u64);
        let mut state = lock(&self.state);
        if bytes == 0 || state.is_off || range.end > opened.store.len() {
            return Ok(false);
        }
        let place = place(opened, &to, "dst")?;
        if state.loader.is_some() && state.mark != opened.store.write_mark() {
            // Layers that were read ahead may be older than a write that has happened since.
            state.end()?;
        }
        if state.loader.is_none() && state.pass.first() == Some(&range) && state.pass.len() > 1 {
            state.begin(opened, self.slots, place);
        }
        let PassState { pass, loader, .. } = &mut *state;
        let Some((loader, of_loader)) = loader else {
            if !pass.contains(&range) {
                pass.push(range);
            }
            return Ok(false);
        };
        let Some(index) = pass.iter().position(|one| *one == range) else {
            return Ok(false);
        };
        if *of_loader != place {
            return Ok(false);
        }
        let layer = loader.layer(index)?;
        match layer.bytes() {
            // SAFETY: the caller keeps the conditions under `# Safety`.
            Some(data) => unsafe { to.bytes_mut() }.copy_from_slice(&data[..bytes]),
            // SAFETY: the caller keeps the conditions under `# Safety`.
            None => unsafe { copy_on_gpu(opened, &layer, &to, bytes) }?,
        }
        Ok(true)
    }
}

impl Drop for LoaderPasses {
    /// Waits for reads under way, so that the device is free when it is closed.
    fn drop(&mut self) {
        if let Some((loader, _)) = &lock(&self.state).loader {
            let _ = loader.close(PATIENCE);
        }
    }
}

impl PassState {
    /// Drops the layers that were read ahead. The order of the layers stays known: reads ahead begin again with
    /// the first.
    fn end(&mut self) -> Answer<()> {
        if let Some((loader, _)) = self.loader.take() {
            loader.close(PATIENCE)?;
        }
        Ok(())
    }

    /// Begins a pass whose order is known.
    fn begin(&mut self, opened: &OpenedStore, slots: usize, place: CallLocation) {
        // Before the first read: a write that ends later makes another mark.
        self.mark = opened.store.write_mark();
        let ranges = self.pass.iter().cloned();
        let named = ranges.map(|range| (format!("at byte {}", range.start), range));
        let options = LoaderOptions {
            slots,
            memory: match place {
                CallLocation::Host => LayerMemory::Host,
                CallLocation::Gpu => LayerMemory::Gpu,
            },
            ..LoaderOptions::default()
        };
        let layers = ModelLayers::of_ranges(named);
        let made = layers.and_then(|layers| LayerLoader::new(&opened.store, layers, &options));
        match made {
            Ok(loader) => self.loader = Some((loader, place)),
            Err(_) => self.is_off = true,
        }
    }
}

/// # Safety
/// `to` is memory of the GPU for `bytes` bytes.
#[cfg(feature = "cuda")]
unsafe fn copy_on_gpu(
    opened: &OpenedStore,
    layer: &LoadedLayer,
    to: &CallMemory,
    bytes: usize,
) -> Answer<()> {
    use nvme_gpu_capi::status::CallFailure;
    use nvme_host::cuda::Stream;
    let Some(gpu) = &opened.gpu else {
        return Err(CallFailure::usage(
            "the layer is to go into GPU memory, and the device was opened without a GPU",
            "open the device with a GPU",
        ));
    };
    layer.wait(PATIENCE)?;
    // The layer is loaded, so a copy in any stream may read it.
    let stream = Stream::new(gpu)?;
    // SAFETY: the caller's; the layer is held until the copy has ended.
    unsafe { stream.copy_within(to.address(), layer.address(), bytes)? };
    Ok(stream.finish()?)
}

/// # Safety
/// As above.
#[cfg(not(feature = "cuda"))]
unsafe fn copy_on_gpu(_: &OpenedStore, _: &LoadedLayer, _: &CallMemory, _: usize) -> Answer<()> {
    Ok(())
}
