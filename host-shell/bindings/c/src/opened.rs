//! Objects behind the handles of stores and tables.

use crate::border::Answer;
use crate::handles::OpenHandles;
#[cfg(feature = "cuda")]
use nvme_host::lock::lock;
use nvme_host::store::RowScales;
use nvme_host::{Store, Table};
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

/// A store: a drive, a file, or several in stripes. Opaque.
pub struct StoreHandle {
    _opaque: [u8; 0],
}

/// Rows of one size in a store. Opaque; closed with its store.
pub struct TableHandle {
    _opaque: [u8; 0],
}

/// Object of a handle of a store.
pub struct OpenedStore {
    pub store: Arc<Store>,
    #[cfg(feature = "cuda")]
    pub gpu: Option<Arc<nvme_host::cuda::Gpu>>,
    /// Queue pairs that are kept for kernels.
    #[cfg(feature = "cuda")]
    pub kernel_queues: u32,
    pub registered: Mutex<BTreeMap<usize, RegisteredRange>>,
    /// Launches that may use registered memory, with those that have ended since the last one.
    #[cfg(feature = "cuda")]
    pub launched: Mutex<Vec<Arc<crate::pending::WaitingOperation>>>,
    pub background_failures: Arc<AtomicU64>,
}

/// Memory that was registered: its length, and its registration with the GPU's driver.
pub struct RegisteredRange {
    pub bytes: usize,
    #[cfg(feature = "cuda")]
    pub memory: Option<Arc<nvme_host::cuda::CallerMemory>>,
}

#[cfg(feature = "cuda")]
impl OpenedStore {
    /// Returns the registrations that a launch may need.
    pub fn registrations(&self) -> Vec<Arc<nvme_host::cuda::CallerMemory>> {
        let registered = lock(&self.registered);
        let of_gpu = registered.values().filter_map(|one| one.memory.as_ref());
        of_gpu.cloned().collect()
    }

    /// Remembers a launch while memory is registered, so that [`end_registrations`](Self::end_registrations) finds it.
    pub fn note_launch(&self, launch: &Arc<crate::pending::WaitingOperation>) {
        if !self.registrations().is_empty() {
            let mut launched = lock(&self.launched);
            launched.retain(|one| !one.is_over());
            launched.push(Arc::clone(launch));
        }
    }

    /// Ends all registrations once no launch, and no graph with one, may use them any more.
    pub fn end_registrations(&self) {
        let registrations = self.registrations();
        lock(&self.registered).clear();
        let launched = std::mem::take(&mut *lock(&self.launched));
        if !registrations.is_empty() {
            crate::kept::keep(Box::new(move || {
                let _ = &registrations;
                launched.iter().all(|one| one.is_over())
            }));
        }
    }
}

pub static STORES: OpenHandles<Arc<OpenedStore>> = OpenHandles::new();

/// Returns the object of `store`.
pub fn opened(store: *const StoreHandle) -> Answer<Arc<OpenedStore>> {
    STORES.get(store, "store")
}

/// Opens a handle in `handles` for `thing` of `store`.
///
/// Closing a store closes what is open of it. A handle that is opened while its store is being closed could be missed
/// and keep the device, so the store is looked up once more.
///
/// # Errors
/// Those of [`opened`].
pub fn open_in<T: Clone, H>(
    handles: &OpenHandles<T>,
    store: *const StoreHandle,
    thing: T,
) -> Answer<*mut H> {
    let handle = handles.open(thing);
    match opened(store) {
        Ok(_) => Ok(handle),
        Err(failure) => {
            drop(handles.close(handle));
            Err(failure)
        }
    }
}

/// Object of a handle of a table.
#[derive(Clone)]
pub struct OpenTable {
    /// The address of the store's handle.
    pub store: usize,
    pub opened: Arc<OpenedStore>,
    pub table: Table,
    /// Scales that the elements of converted rows are multiplied by.
    pub scales: Option<Arc<RowScales>>,
}

/// Queues, result cells and a buffer for kernels of a program. Opaque; closed with its store.
pub struct DeviceHandle {
    _opaque: [u8; 0],
}

/// Object of a handle of queues for kernels.
pub struct OpenDevice {
    /// The address of the store's handle.
    pub store: usize,
    #[cfg(feature = "cuda")]
    pub queues: nvme_host::cuda::KernelQueues,
}

pub static DEVICES: OpenHandles<Arc<OpenDevice>> = OpenHandles::new();

pub static TABLES: OpenHandles<Arc<OpenTable>> = OpenHandles::new();
