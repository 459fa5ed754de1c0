//! The worker threads and their two queues.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;

use crate::engine::{Ending, Engine, Sandbox, Worker};
use crate::error::{Error, Result};
use crate::spec::Spec;
use crate::sys::raw;

pub enum Job {
    Start(Box<Spec>),
    End(Box<Sandbox>),
}

pub enum Done {
    Started(Result<Box<Sandbox>>),
    Ended(Result<Ending>),
}

/// Jobs go in and results come out, each with the token of its sandbox. `wake` is readable while results wait.
pub struct Pool {
    shared: Arc<Shared>,
    pub wake: OwnedFd,
}

struct Shared {
    jobs: Mutex<VecDeque<(u64, Job)>>,
    more: Condvar,
    done: Mutex<Vec<(u64, Done)>>,
    wake: i32,
}

impl Pool {
    pub fn start(engine: &Arc<Engine>) -> Result<Self> {
        // SAFETY: plain system call.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(Error::last("eventfd", ""));
        }
        // SAFETY: just made.
        let wake = unsafe { OwnedFd::from_raw_fd(fd) };
        let shared = Arc::new(Shared {
            jobs: Mutex::default(),
            more: Condvar::new(),
            done: Mutex::default(),
            wake: wake.as_raw_fd(),
        });
        let (report, ready) = std::sync::mpsc::channel();
        for number in 0..engine.workers {
            let (engine, shared, report) = (engine.clone(), shared.clone(), report.clone());
            spawn(&format!("worker-{number}"), move || {
                let worker = Worker::enter(engine.clone(), number);
                let failed = worker.as_ref().err().map(ToString::to_string);
                let _ = report.send(failed);
                drop(report);
                if let Ok(worker) = worker {
                    shared.work(&engine, worker);
                }
            })?;
        }
        drop(report);
        if let Some(text) = ready.into_iter().take(engine.workers).flatten().next() {
            return Err(Error::Unsupported(format!("a worker cannot start: {text}")));
        }
        let filler = engine.clone();
        spawn("filler", move || match crate::engine::keep_capabilities() {
            Ok(()) => filler.slots.run_filler(&filler.host, &filler.cgroups),
            Err(e) => eprintln!("dsec-launch: no filler: {e}"),
        })?;
        Ok(Self { shared, wake })
    }

    pub fn submit(&self, token: u64, job: Job) {
        self.shared
            .jobs
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push_back((token, job));
        self.shared.more.notify_one();
    }

    pub fn results(&self) -> Vec<(u64, Done)> {
        let mut count = 0u64;
        // SAFETY: `count` has the eight bytes that an eventfd gives.
        unsafe { libc::read(self.wake.as_raw_fd(), (&raw mut count).cast(), 8) };
        std::mem::take(
            &mut *self
                .shared
                .done
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        )
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    let made = thread::Builder::new()
        .name(name.into())
        .stack_size(512 * 1024)
        .spawn(work);
    made.map(drop).map_err(|e| Error::os("thread", name, e))
}

impl Shared {
    fn work(&self, engine: &Engine, mut worker: Worker) {
        loop {
            let (token, job) = self.next();
            let done = match job {
                Job::Start(spec) => Done::Started(worker.start(&spec).map(Box::new)),
                Job::End(sandbox) => Done::Ended(engine.end(*sandbox)),
            };
            self.done
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push((token, done));
            let _ = raw::write(self.wake, &1u64.to_ne_bytes());
        }
    }

    fn next(&self) -> (u64, Job) {
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(job) = jobs.pop_front() {
                return job;
            }
            jobs = self.more.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
