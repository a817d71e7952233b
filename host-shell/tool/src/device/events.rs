//! `events`: asynchronous events of the controller.

use crate::common::{DeviceArgs, duration, output, stop_flag};
use clap::Args;
use nvme_host::{ControllerConfig, ControllerNotice, DeviceEvent, NoticeListener, Result};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Pause between two polls.
const PAUSE: Duration = Duration::from_millis(20);

/// Print asynchronous events as the controller reports them, one a line
///
/// Health warnings, changed namespaces, firmware activations, errors. Other commands print the events that come while
/// they run as warnings.
#[derive(Args)]
pub struct EventsCommand {
    #[command(flatten)]
    device: DeviceArgs,
    /// Time to wait for events; until Ctrl-C when missing
    #[arg(long = "for", value_name = "TIME", value_parser = duration)]
    time: Option<Duration>,
}

impl EventsCommand {
    pub fn run(self) -> Result<()> {
        let config = self.device.config();
        let others = config.notify.clone();
        let controller = self.device.start_with(&ControllerConfig {
            // This command prints events itself.
            notify: NoticeListener::new(move |notice| match notice {
                ControllerNotice::Event(_) => {}
                other => others.tell(other),
            }),
            ..config
        })?;
        let begin = Instant::now();
        loop {
            // The end is tested first: events that arrived until now are printed below.
            let is_over = stop_flag().load(Ordering::Relaxed)
                || self.time.is_some_and(|time| begin.elapsed() >= time);
            for event in controller.events()? {
                self.print(&event)?;
            }
            if is_over {
                return controller.shut_down();
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn print(&self, event: &DeviceEvent) -> Result<()> {
        match self.device.form.json {
            true => output::line(&output::event_json(event)),
            false => output::print(&event.to_string()),
        }
    }
}
