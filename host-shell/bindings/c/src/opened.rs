//! Objects behind the handles of stores and tables.

use crate::border::Answer;
use crate::handles::OpenHandles;
use nvme_host::store::RowScales;
use nvme_host::{Store, Table};
#[cfg(feature = "cuda")]
use nvme_host::{cuda::StoreLaunches, lock::lock};
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
    pub background_failures: Arc<AtomicU64>,
}

/// Memory that was registered: its length, and its registration with the GPU's driver.
pub struct RegisteredRange {
    pub bytes: usize,
    #[cfg(feature = "cuda")]
    pub memory: Option<nvme_host::cuda::CallerMemory>,
}

#[cfg(feature = "cuda")]
impl Drop for OpenedStore {
    /// Ends the registrations once no launch, and no graph with one, may use the memory any more. Calls of other threads
    /// have ended: each keeps the store.
    fn drop(&mut self) {
        let registered = std::mem::take(&mut *lock(&self.registered));
        if registered.values().any(|one| one.memory.is_some()) {
            let launches = self.store.launches_on_gpu();
            crate::kept::keep(Box::new(move || {
                let _ = &registered;
                launches.iter().all(StoreLaunches::are_over)
            }));
            crate::kept::reap();
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
