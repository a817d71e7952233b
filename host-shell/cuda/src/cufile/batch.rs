//! The ends of the entries of a batch.
// UNSAFETY: calls into the library.
#![allow(unsafe_code)]

use super::code::{CufileCode, failed};
use super::library::{IoEvent, Library};
use crate::stream::PATIENCE;
use nvme_driver::error::{Error, Result};
use std::cell::Cell;
use std::time::{Duration, Instant};

/// Time that one call of the library waits for an entry to end.
const WAIT: Duration = Duration::from_millis(100);
/// Time of further polling after an answer that made no sense: long enough for reads of a drive to end.
const AFTER_TROUBLE: Duration = Duration::from_secs(2);

/// A batch that was set up. It is destroyed on drop, unless some of its entries may still be in progress.
pub struct CufileBatch {
    library: Library,
    id: usize,
    /// True if entries may be in progress: the batch is not destroyed then.
    keep: Cell<bool>,
}

impl CufileBatch {
    pub fn new(library: Library, id: usize) -> Self {
        Self {
            library,
            id,
            keep: Cell::new(false),
        }
    }

    pub fn id(&self) -> usize {
        self.id
    }

    /// Waits for the ends of its `count` entries, whose cookies are their indices, and returns the bytes that
    /// each transferred.
    ///
    /// # Errors
    /// [`Error::Unfinished`] when cuFile does not report the end of some.
    pub fn ends(self, count: usize) -> Result<Vec<Result<u64>>> {
        let mut ended: Vec<Option<Result<u64>>> = (0..count).map(|_| None).collect();
        let (mut left, begin) = (count, Instant::now());
        let mut trouble: Option<(Error, Instant)> = None;
        while left > 0 {
            let is_over = match &trouble {
                Some((_, since)) => since.elapsed() > AFTER_TROUBLE,
                None => begin.elapsed() > PATIENCE,
            };
            if is_over {
                self.keep.set(true);
                return Err(unfinished(left, trouble.map(|(error, _)| error)));
            }
            let found = self.found(left).and_then(|events| {
                let mut strange = Ok(());
                for event in events.iter().filter(|event| is_end(event)) {
                    match ended.get_mut(event.cookie).filter(|place| place.is_none()) {
                        Some(place) => {
                            *place = Some(of_event(event));
                            left -= 1;
                        }
                        None => {
                            strange = Err(Error::internal("cuFile ended what was not in the batch"))
                        }
                    }
                }
                strange
            });
            if let Err(error) = found {
                trouble.get_or_insert((error, Instant::now()));
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(ended.into_iter().flatten().collect())
    }

    /// Checks whether some of the `count` entries were submitted although the submission failed with `error`, as the
    /// entries before a refused one may be: cuFile then reports their state, or their end.
    ///
    /// # Errors
    /// `error` if none is; else [`Error::Unfinished`], and the batch is not destroyed.
    pub fn check_unused(&self, count: usize, error: Error) -> Result<()> {
        let (mut ended, mut is_used) = (0, false);
        let begin = Instant::now();
        while begin.elapsed() < AFTER_TROUBLE && ended < count {
            match self.found(count) {
                Ok(events) if !events.is_empty() => {
                    is_used = true;
                    ended += events.iter().filter(|event| is_end(event)).count();
                }
                _ => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        match is_used && ended < count {
            false => Err(error),
            true => {
                self.keep.set(true);
                Err(unfinished(count - ended, Some(error)))
            }
        }
    }

    /// Returns the events since the last call, after waiting a moment for the first.
    fn found(&self, most: usize) -> Result<Vec<IoEvent>> {
        let mut events = vec![IoEvent::default(); most];
        let mut found = most as u32;
        let mut wait = libc::timespec {
            tv_sec: 0,
            tv_nsec: WAIT.as_nanos() as i64,
        };
        // SAFETY: the array has room for `found` events.
        let answer = unsafe {
            let (status, all) = (self.library.batch_status, events.as_mut_ptr());
            status(self.id, 1, &mut found, all, &mut wait)
        };
        answer.check("cuFileBatchIOGetStatus")?;
        events.truncate(found as usize);
        Ok(events)
    }
}

impl Drop for CufileBatch {
    fn drop(&mut self) {
        if self.keep.get() {
            return;
        }
        // SAFETY: the batch was set up by us, and none of its entries is in progress.
        unsafe { (self.library.batch_destroy)(self.id) };
    }
}

fn unfinished(left: usize, trouble: Option<Error>) -> Error {
    let why = trouble.map_or_else(String::new, |error| format!(": {error}"));
    Error::Unfinished {
        cause: format!("cuFile did not tell of the end of {left} entries of a batch{why}"),
        remedy:
            "keep the memory of all until the process ends; see cufile.log in the working directory"
                .to_owned(),
    }
}

/// True if an event is the end of its entry: not one that waits (1) or is in progress (2).
fn is_end(event: &IoEvent) -> bool {
    !matches!(event.status, 0x1 | 0x2)
}

/// Returns the bytes that an entry transferred, or its error.
fn of_event(event: &IoEvent) -> Result<u64> {
    const COMPLETE: u32 = 0x10;
    match (event.status, event.bytes as isize) {
        (COMPLETE, moved @ 0..) => Ok(moved as u64),
        (COMPLETE | 0x40, below) if below < -1 => {
            Err(failed("cuFileBatchIO", CufileCode(-below as i32), 0))
        }
        (status, _) => Err(Error::environment(
            format!("an entry of a batch of cuFile ended with state {status:#x}"),
            "see cufile.log in the working directory; leave gds at auto",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_end_as_their_state_says() {
        let event = |status, bytes: isize| IoEvent {
            cookie: 0,
            status,
            bytes: bytes as usize,
        };
        assert_eq!(of_event(&event(0x10, 4096)).unwrap(), 4096);
        let error = of_event(&event(0x40, -5030)).unwrap_err();
        assert!(error.to_string().contains("5030"), "{error}");
        assert!(of_event(&event(0x8, 0)).is_err());
        assert!(!is_end(&event(0x1, 0)) && !is_end(&event(0x2, 0)) && is_end(&event(0x40, 0)));
    }
}
