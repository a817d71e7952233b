//! Calls that run on threads of the store, and their ends: the base of asynchronous interfaces.
//!
//! Invariant: the objects that a job owns, its buffers above all, live until the job has ended, whether or not its end
//! is waited for.

use nvme_driver::error::{Error, Result};
use nvme_driver::lock::lock;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Limit of the threads of one store. They wait for devices most of the time; more calls than threads wait in a
/// queue.
const MOST_WORKERS: usize = 16;

type Job = Box<dyn FnOnce() + Send>;

/// The threads of a store and the jobs that wait for one. Threads start when jobs need them.
#[derive(Default)]
pub(crate) struct BackgroundThreads {
    shared: Arc<BackgroundShared>,
}

#[derive(Default)]
struct BackgroundShared {
    state: Mutex<BackgroundState>,
    changed: Condvar,
}

#[derive(Default)]
struct BackgroundState {
    jobs: VecDeque<Job>,
    workers: usize,
    idle: usize,
    is_closed: bool,
}

impl BackgroundThreads {
    /// Runs `job` with `context` on one of the threads. The context is dropped before the end is made known.
    ///
    /// # Errors
    /// [`Error::System`] when there is no thread and none can be started; the job is dropped.
    pub fn start<C, T, J>(&self, context: C, job: J) -> Result<BackgroundOperation<T>>
    where
        C: Send + 'static,
        T: Send + 'static,
        J: FnOnce(&C) -> T + Send + 'static,
    {
        let slot = Arc::new(ResultSlot::default());
        let to = Arc::clone(&slot);
        let run = move || {
            let result = catch_unwind(AssertUnwindSafe(|| job(&context)));
            // The context may hold the last reference to the store. It is dropped before the result is
            // published, so that a waiter which opens the device next finds it free.
            let closed = catch_unwind(AssertUnwindSafe(|| drop(context)));
            let result = closed.and(result).map_err(|panic| {
                let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
                let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
                text.unwrap_or_default()
            });
            to.end(result);
        };
        self.queue(Box::new(run))?;
        Ok(BackgroundOperation { slot })
    }

    fn queue(&self, job: Job) -> Result<()> {
        let mut state = lock(&self.shared.state);
        state.jobs.push_back(job);
        if state.jobs.len() > state.idle && state.workers < MOST_WORKERS {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name("nvme-gpu-store".to_owned());
            match thread.spawn(move || shared.work()) {
                Ok(_) => state.workers += 1,
                // An existing worker takes the job when it becomes idle.
                Err(_) if state.workers > 0 => {}
                Err(source) => {
                    let job = state.jobs.pop_back();
                    drop(state);
                    drop(job);
                    let call = "starting a thread of the store";
                    return Err(Error::System { call, source });
                }
            }
        }
        drop(state);
        self.shared.changed.notify_one();
        Ok(())
    }
}

impl Drop for BackgroundThreads {
    /// Does not wait: the threads end once no job is left.
    fn drop(&mut self) {
        lock(&self.shared.state).is_closed = true;
        self.shared.changed.notify_all();
    }
}

impl BackgroundShared {
    fn work(&self) {
        let mut state = lock(&self.state);
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job();
                state = lock(&self.state);
            } else if state.is_closed {
                return;
            } else {
                state.idle += 1;
                state = self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
            }
        }
    }
}

/// A call that runs in the background, from [`Store::in_background`](super::Store::in_background) and
/// [`Table::in_background`](super::Table::in_background).
///
/// Dropping it does not stop the call: the thread that runs the call drops what it owns when it has ended.
#[must_use = "errors are known from the result"]
pub struct BackgroundOperation<T> {
    slot: Arc<ResultSlot<T>>,
}

struct ResultSlot<T> {
    end: Mutex<OperationEnd<T>>,
    ended: Condvar,
    /// Functions that run when the end is known.
    notices: Mutex<Vec<EndNotice>>,
}

type EndNotice = Box<dyn FnOnce() + Send>;

impl<T> Default for ResultSlot<T> {
    fn default() -> Self {
        Self {
            end: Mutex::new(OperationEnd::Open),
            ended: Condvar::new(),
            notices: Mutex::default(),
        }
    }
}

enum OperationEnd<T> {
    Open,
    /// The error is the text of a panic.
    Ended(std::result::Result<T, String>),
    Taken,
}

impl<T> ResultSlot<T> {
    fn end(&self, result: std::result::Result<T, String>) {
        *lock(&self.end) = OperationEnd::Ended(result);
        self.ended.notify_all();
        // Taken after the end was made known: a notice that is added later finds it.
        let notices = std::mem::take(&mut *lock(&self.notices));
        notices.into_iter().for_each(|notice| notice());
    }
}

impl<T> std::fmt::Debug for BackgroundOperation<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut text = f.debug_struct("BackgroundOperation");
        text.field("is_done", &self.is_done()).finish()
    }
}

impl<T> BackgroundOperation<T> {
    /// True if the call has ended.
    pub fn is_done(&self) -> bool {
        !matches!(*lock(&self.slot.end), OperationEnd::Open)
    }

    /// Waits until the call has ended, `limit` at most; returns true if it has.
    pub fn wait(&self, limit: Duration) -> bool {
        let is_open = |end: &mut OperationEnd<T>| matches!(end, OperationEnd::Open);
        let end = lock(&self.slot.end);
        let waited = self.slot.ended.wait_timeout_while(end, limit, is_open);
        let (mut end, _) = waited.unwrap_or_else(PoisonError::into_inner);
        !is_open(&mut end)
    }

    /// Runs `notice` once the end of the call is known: on the thread of the call, which it must not keep waiting, or here
    /// if the call has ended.
    pub fn when_ended(&self, notice: impl FnOnce() + Send + 'static) {
        let mut notices = lock(&self.slot.notices);
        if !self.is_done() {
            notices.push(Box::new(notice));
            return;
        }
        drop(notices);
        notice();
    }

    /// Returns the result of the call; `None` before its end, and once it was taken.
    ///
    /// # Errors
    /// [`Error::Internal`] when the call panicked.
    pub fn take(&self) -> Option<Result<T>> {
        let mut end = lock(&self.slot.end);
        match std::mem::replace(&mut *end, OperationEnd::Taken) {
            OperationEnd::Open => {
                *end = OperationEnd::Open;
                None
            }
            OperationEnd::Ended(result) => Some(result.map_err(|text| {
                Error::internal(format!("a call in the background panicked: {text}"))
            })),
            OperationEnd::Taken => None,
        }
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::super::testing::{TestFile, options};
    use super::super::{Store, StoreOptions};
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc;

    const LONG: Duration = Duration::from_secs(60);

    fn store() -> Store {
        Store::open("sim:mem?size=4MiB", &options()).unwrap()
    }

    #[test]
    fn a_call_returns_what_it_read_and_once() {
        let store = store();
        store.write_at(1001, b"bytes").unwrap();
        let read = store
            .in_background(|store| {
                let mut data = [0; 5];
                store.read_at(1001, &mut data).map(|()| data)
            })
            .unwrap();
        assert!(read.wait(LONG) && read.is_done());
        assert_eq!(&read.take().unwrap().unwrap().unwrap(), b"bytes");
        assert!(read.take().is_none() && read.is_done() && read.wait(LONG));
        assert!(format!("{read:?}").contains("is_done: true"));
    }

    #[test]
    fn rows_are_gathered_in_the_background() {
        let store = store();
        store.write_at(300, &[7; 100]).unwrap();
        let table = store.table(0, 10, 100).unwrap();
        let gather = table
            .in_background(|table| {
                let mut out = vec![0; 100];
                let report = table.gather((&[3i64]).into(), &mut out, None);
                report.and_then(|report| report.check()).map(|()| out)
            })
            .unwrap();
        assert!(gather.wait(LONG));
        assert_eq!(gather.take().unwrap().unwrap().unwrap(), [7; 100]);
    }

    #[test]
    fn a_call_that_has_not_ended_keeps_what_it_owns() {
        struct Buffer(mpsc::Sender<()>);
        impl Drop for Buffer {
            fn drop(&mut self) {
                self.0.send(()).unwrap();
            }
        }
        let store = store();
        let (go, gone) = mpsc::channel::<()>();
        let (dropped, is_dropped) = mpsc::channel();
        let buffer = Buffer(dropped);
        let operation = store
            .in_background(move |_| {
                gone.recv().unwrap();
                buffer
            })
            .unwrap();
        assert!(!operation.wait(Duration::from_millis(20)) && !operation.is_done());
        assert!(operation.take().is_none() && !operation.is_done());
        drop(operation);
        assert!(is_dropped.try_recv().is_err());
        go.send(()).unwrap();
        is_dropped.recv_timeout(LONG).unwrap();
    }

    #[test]
    fn a_notice_comes_once_after_the_end_and_at_once_when_it_is_over() {
        let store = store();
        let (go, gone) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel();
        let operation = Arc::new(store.in_background(move |_| gone.recv().unwrap()).unwrap());
        let (seen, notice) = (Arc::downgrade(&operation), tell.clone());
        operation.when_ended(move || {
            let is_done = seen.upgrade().is_some_and(|operation| operation.is_done());
            notice.send(is_done).unwrap();
        });
        assert!(told.recv_timeout(Duration::from_millis(20)).is_err());
        go.send(()).unwrap();
        assert!(told.recv_timeout(LONG).unwrap());
        operation.when_ended(move || tell.send(true).unwrap());
        assert!(told.try_recv().unwrap());
        assert!(told.try_recv().is_err());
    }

    #[test]
    fn a_closed_store_carries_out_what_was_started_and_then_lets_the_device_go() {
        let image = TestFile::new(4 << 20);
        let name = format!("sim:{}", image.text());
        let open = || Store::open(&name, &StoreOptions::default());
        let store = open().unwrap();
        let (go, gone) = mpsc::channel::<()>();
        let first = store.in_background(move |_| gone.recv().unwrap()).unwrap();
        let write = |place: u64| {
            let at = place * 4096;
            store.in_background(move |store| store.write_at(at, &[place as u8; 4096]))
        };
        let writes: Vec<_> = (1..200).map(|place| write(place).unwrap()).collect();
        drop(store);
        go.send(()).unwrap();
        for write in writes {
            assert!(write.wait(LONG));
            write.take().unwrap().unwrap().unwrap();
        }
        assert!(first.wait(LONG));
        let store = open().unwrap();
        let mut data = [0; 4096];
        for place in 1..200u64 {
            store.read_at(place * 4096, &mut data).unwrap();
            assert_eq!(data, [place as u8; 4096]);
        }
    }

    #[test]
    fn a_panic_is_an_error_and_the_next_call_runs() {
        let store = store();
        for text in ["one", "two"] {
            let panics = store.in_background(move |_| std::panic::panic_any(text.to_owned()));
            let panics = panics.unwrap();
            assert!(panics.wait(LONG));
            let error = panics.take().unwrap().unwrap_err();
            assert!(matches!(&error, Error::Internal { cause } if cause.ends_with(text)));
        }
        let next = store.in_background(Store::flush).unwrap();
        assert!(next.wait(Duration::MAX));
        next.take().unwrap().unwrap().unwrap();
    }

    #[test]
    fn threads_are_few_and_all_of_them_work() {
        let store = store();
        let running = Arc::new(AtomicU32::new(0));
        let (go, gone) = mpsc::channel::<()>();
        let gone = Arc::new(Mutex::new(gone));
        let job = || {
            let (running, gone) = (Arc::clone(&running), Arc::clone(&gone));
            store.in_background(move |_| {
                running.fetch_add(1, Ordering::Relaxed);
                lock(&gone).recv().unwrap();
            })
        };
        let all: Vec<_> = (0..40).map(|_| job().unwrap()).collect();
        while running.load(Ordering::Relaxed) < MOST_WORKERS as u32 {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(running.load(Ordering::Relaxed), MOST_WORKERS as u32);
        for _ in 0..40 {
            go.send(()).unwrap();
        }
        assert!(all.iter().all(|one| one.wait(LONG)));
    }
}
