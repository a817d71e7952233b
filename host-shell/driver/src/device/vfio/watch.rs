//! The two events of a device behind the kernel: the system wants it back, or it reported a fatal error. A thread
//! waits for both by poll, because the kernel blocks an unbind until the descriptor is closed.

use super::ioctl;
use crate::error::{Error, Result};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::fs::File;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use vfio_bindings::bindings::vfio::{VFIO_PCI_ERR_IRQ_INDEX, VFIO_PCI_REQ_IRQ_INDEX};

/// Event after which the device must be returned to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReturnEvent {
    /// The device is being unbound or removed, and the kernel waits for this process.
    Wanted,
    /// The device reported an uncorrectable error.
    Failed,
}

/// A thread that waits for these events. Ends when dropped.
pub struct DeviceWatch {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

/// Creates an event descriptor.
pub fn event() -> Result<OwnedFd> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(|errno| Error::system("eventfd")(errno.into()))
}

impl DeviceWatch {
    /// Arms both events of `device` and starts a thread that calls `then` once, when the first one is
    /// signalled.
    ///
    /// A kernel that lacks one of the events never signals it.
    pub fn start(device: &File, then: impl FnOnce(ReturnEvent) + Send + 'static) -> Result<Self> {
        let (wanted, failed) = (event()?, event()?);
        let arm = |index, event: &OwnedFd| match ioctl::irq_count(device, index) {
            Ok(0) | Err(_) => Ok(()),
            Ok(_) => ioctl::set_irqs(device, index, &[event.as_fd()]),
        };
        arm(VFIO_PCI_REQ_IRQ_INDEX, &wanted).map_err(Error::system("arming the device request"))?;
        arm(VFIO_PCI_ERR_IRQ_INDEX, &failed).map_err(Error::system("arming the error event"))?;
        let mut then = Some(then);
        Self::over(wanted, failed, move |event| {
            if let Some(then) = then.take() {
                then(event);
            }
            ControlFlow::Break(())
        })
    }

    /// Does the same as [`start`](Self::start), for events that are armed, until `then` has heard enough.
    pub fn over(
        wanted: OwnedFd,
        failed: OwnedFd,
        mut then: impl FnMut(ReturnEvent) -> ControlFlow<()> + Send + 'static,
    ) -> Result<Self> {
        let stop = Arc::new(event()?);
        let thread = std::thread::Builder::new()
            .name("device-events".to_owned())
            .spawn({
                let stop = Arc::clone(&stop);
                move || {
                    while let Some(event) = wait(&wanted, &failed, &stop) {
                        // Clears the event first: one that is signalled from here on wakes the next wait.
                        let heard = match event {
                            ReturnEvent::Wanted => &wanted,
                            ReturnEvent::Failed => &failed,
                        };
                        let _ = rustix::io::read(heard, &mut [0u8; 8]);
                        if then(event).is_break() {
                            break;
                        }
                    }
                }
            })
            .map_err(Error::system(
                "starting the thread for the events of a device",
            ))?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

/// Returns the next event, or none when asked to stop.
fn wait(wanted: &OwnedFd, failed: &OwnedFd, stop: &OwnedFd) -> Option<ReturnEvent> {
    loop {
        let mut fds = [stop, wanted, failed].map(|fd| PollFd::new(fd, PollFlags::IN));
        // Interrupted by a signal, most likely.
        let _ = poll(&mut fds, None);
        let [stop, wanted, failed] = fds.map(|fd| fd.revents().contains(PollFlags::IN));
        match (stop, wanted, failed) {
            (true, ..) => return None,
            (_, true, _) => return Some(ReturnEvent::Wanted),
            (.., true) => return Some(ReturnEvent::Failed),
            _ => {}
        }
    }
}

impl Drop for DeviceWatch {
    fn drop(&mut self) {
        // Cannot fail: the counter is far from its limit.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_event_is_told_and_a_stop_ends_the_wait() {
        let ring = |fd: &OwnedFd| rustix::io::write(fd, &1u64.to_ne_bytes()).unwrap();
        let fds = || [event().unwrap(), event().unwrap(), event().unwrap()];
        let [wanted, failed, stop] = fds();
        ring(&failed);
        assert_eq!(wait(&wanted, &failed, &stop), Some(ReturnEvent::Failed));
        ring(&wanted);
        assert_eq!(wait(&wanted, &failed, &stop), Some(ReturnEvent::Wanted));
        ring(&stop);
        assert_eq!(wait(&wanted, &failed, &stop), None);
    }

    #[test]
    fn who_has_not_heard_enough_is_told_of_the_next_event() {
        let (wanted, failed) = (event().unwrap(), event().unwrap());
        let ring = wanted.try_clone().unwrap();
        let (sender, heard) = std::sync::mpsc::channel();
        let mut left = 2;
        let watch = DeviceWatch::over(wanted, failed, move |event| {
            left -= 1;
            sender.send(event).unwrap();
            match left {
                0 => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        });
        for _ in 0..2 {
            rustix::io::write(&ring, &1u64.to_ne_bytes()).unwrap();
            assert_eq!(heard.recv(), Ok(ReturnEvent::Wanted));
        }
        // The thread has ended, and with it the sender.
        assert!(heard.recv().is_err());
        drop(watch);
    }

    #[test]
    fn a_watch_that_is_dropped_ends_its_thread() {
        // The file is no VFIO device: it has no events, and the thread waits only for the stop.
        let file = File::open("/dev/null").unwrap();
        drop(DeviceWatch::start(&file, |_| panic!("no event")).unwrap());
    }
}
