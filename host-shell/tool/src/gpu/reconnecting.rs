//! A session of a GPU that continues after outages: commands without an answer, controller resets, a device that left.

use crate::common::file::{check_output, write_whole};
use crate::common::images::CommandFiles;
use crate::common::{check_stop, stop_flag};
use nvme_host::cuda::{GpuSession, LaunchResult, LaunchWork, SessionSetup};
use nvme_host::outage::{self, OutageCounts};
use nvme_host::{ControllerConfig, Device, Error, Result};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Limit of outages in a row, without progress between them, after which the run ends with an error.
pub const MOST_FAILURES: u32 = 16;

/// Parameters for opening a [`ReconnectingSession`] session.
pub struct SessionSource<'a> {
    /// The device, as the user named it on the command line.
    pub device: &'a str,
    pub config: ControllerConfig,
    pub setup: SessionSetup,
    /// File of the trace, if one is requested.
    pub trace: Option<&'a Path>,
    /// Files of the command, which the trace must not replace.
    pub files: &'a CommandFiles,
    /// Time to wait for a device that left; without it, every outage is an error.
    pub recover: Option<Duration>,
    /// Bytes of a command, and minimum of the data memory.
    pub bytes: u64,
    pub data_bytes: u64,
}

/// A session that opens its device again after it left, if the user asks for that.
pub struct ReconnectingSession<'a> {
    source: SessionSource<'a>,
    /// `None` while the device is being opened again.
    session: Option<GpuSession>,
    pub outages: OutageCounts,
}

impl<'a> ReconnectingSession<'a> {
    /// Hands queues of `opened`, which is the source's device, to the GPU.
    pub fn open(source: SessionSource<'a>, opened: Arc<dyn Device>) -> Result<Self> {
        if let Some(trace) = source.trace {
            check_output(trace, source.files)?;
        }
        let session = Some(source.open(opened)?);
        Ok(Self {
            source,
            session,
            outages: OutageCounts::default(),
        })
    }

    pub fn session(&self) -> Result<&GpuSession> {
        self.session.as_ref().ok_or_else(closed)
    }

    pub fn session_mut(&mut self) -> Result<&mut GpuSession> {
        self.session.as_mut().ok_or_else(closed)
    }

    /// Runs `work`; returns the counts, and true if all of it was done. Otherwise the work has to be repeated.
    pub fn run(&mut self, what: &str, work: &LaunchWork) -> Result<(Option<LaunchResult>, bool)> {
        let ended = self.session_mut()?.attempt(what, work);
        let ended = self.source.keep(self.session()?, ended);
        match ended {
            Ok((ran, None)) => Ok((Some(ran), true)),
            Ok((_, Some(lost))) if self.source.recover.is_none() => {
                Err(Error::Gone { cause: lost.cause })
            }
            Ok((ran, Some(lost))) => {
                lost.note(&mut self.outages);
                Ok((Some(ran), false))
            }
            Err(error @ Error::Gone { .. }) => {
                self.again(error)?;
                self.outages.lost += work.commands;
                self.outages.retried += work.commands;
                Ok((None, false))
            }
            Err(error) => Err(error),
        }
    }

    /// Runs `work` until all of it was done in one launch.
    pub fn run_whole(&mut self, what: &str, work: &LaunchWork) -> Result<LaunchResult> {
        for _ in 0..MOST_FAILURES {
            check_stop()?;
            if let (Some(ran), true) = self.run(what, work)? {
                return Ok(ran);
            }
        }
        Err(too_many(what))
    }

    /// Opens the device again after it left.
    fn again(&mut self, error: Error) -> Result<()> {
        let Some(patience) = self.source.recover else {
            return Err(error);
        };
        self.outages.note(error.to_string());
        let facts = |session: &GpuSession| (*session.info(), session.controller().info().serial);
        // The device may be in use until the old session is dropped, and a server serves one at a time.
        self.session()?.controller().device().leave();
        let mut left = self.session.take();
        let recorded = left.as_mut().map(GpuSession::take_recorded);
        let before = left.map(|session| facts(&session));
        let open = || {
            let opened = nvme_host::open(self.source.device)?;
            // If opening fails because the device left again, its connection is closed, and the next attempt
            // opens it once more.
            let session = self.source.open(Arc::clone(&opened));
            let session = session.inspect_err(|_| opened.leave())?;
            let (info, serial) = facts(&session);
            match before.and_then(|before| outage::came_back_as(before, (info, serial))) {
                None => Ok(session),
                Some(error) => Err(error),
            }
        };
        let mut session = outage::reopen(patience, &error, || check_stop().is_err(), open)?;
        session.go_on_from(recorded.unwrap_or_default());
        self.session = Some(session);
        self.outages.reopened += 1;
        Ok(())
    }

    /// Shuts the controller down; returns a report of the session and of its outages.
    pub fn close(self) -> Result<SessionReport> {
        let session = self.session.ok_or_else(closed)?;
        let report = SessionReport {
            gpu: session.gpu().describe(),
            tier: session.tier(),
            relayed: session.access().forwarded(),
            recovery: self.source.recover.map(|_| self.outages),
        };
        session.close()?;
        Ok(report)
    }
}

impl SessionSource<'_> {
    fn open(&self, opened: Arc<dyn Device>) -> Result<GpuSession> {
        let (setup, config) = (self.setup, &self.config);
        let mut session = GpuSession::open(setup, opened, config, self.bytes, self.data_bytes)?;
        session.end_early(stop_flag());
        if self.trace.is_some() {
            session.record()?;
        }
        Ok(session)
    }

    /// Writes the events that kernels recorded; `ended` is the result of the work itself.
    fn keep<T>(&self, session: &GpuSession, ended: Result<T>) -> Result<T> {
        let Some((path, trace)) = self.trace.zip(session.trace()) else {
            return ended;
        };
        // The error of the work matters more than one of its trace.
        let written = write_whole(path, trace.text_for(path).as_bytes(), self.files);
        ended.and_then(|value| written.map(|()| value))
    }
}

fn closed() -> Error {
    Error::internal("the session is closed")
}

pub fn too_many(what: &str) -> Error {
    Error::Gone {
        cause: format!("{what}: {MOST_FAILURES} outages one after the other"),
    }
}

/// Parameters of a session, and its outages.
pub struct SessionReport {
    pub gpu: String,
    pub tier: String,
    /// Doorbells that the host passed on, in tier 0.
    pub relayed: Option<u64>,
    /// Outages, if the user asked to continue after them.
    pub recovery: Option<OutageCounts>,
}

impl SessionReport {
    /// Adds this to the JSON of a command.
    pub fn add_to(&self, value: &mut Value) {
        if let Some(outages) = &self.recovery {
            value["recovery"] = outages.to_json();
        }
    }
}
