//! epoll, signalfd and clocks.

use super::consts::*;
use super::{call, nr, Fd, Result};

#[repr(C)]
#[cfg_attr(target_arch = "x86_64", repr(packed))]
#[derive(Clone, Copy, Default)]
pub struct Event {
    pub events: u32,
    pub data: u64,
}

/// An epoll instance whose entries are known by a token.
pub struct Epoll(Fd);

impl Epoll {
    pub fn new() -> Result<Epoll> {
        call!(nr::EPOLL_CREATE1, O_CLOEXEC).map(|fd| Epoll(Fd::own(fd as i32)))
    }

    fn ctl(&self, op: usize, fd: i32, events: u32, token: u64) -> Result<()> {
        let event = Event {
            events,
            data: token,
        };
        call!(nr::EPOLL_CTL, self.0.raw(), op, fd, &event as *const Event).map(drop)
    }

    pub fn add(&self, fd: i32, events: u32, token: u64) -> Result<()> {
        self.ctl(1, fd, events, token)
    }

    pub fn del(&self, fd: i32) {
        let _ = self.ctl(2, fd, 0, 0);
    }

    pub fn modify(&self, fd: i32, events: u32, token: u64) -> Result<()> {
        self.ctl(3, fd, events, token)
    }

    /// Waits up to `timeout_ms` (-1: for ever); an interrupted wait counts as no events.
    pub fn wait<'a>(&self, events: &'a mut [Event], timeout_ms: i32) -> &'a [Event] {
        let n = call!(
            nr::EPOLL_PWAIT,
            self.0.raw(),
            events.as_mut_ptr(),
            events.len(),
            timeout_ms as isize,
            0,
            8
        );
        &events[..n.unwrap_or(0)]
    }
}

/// A non-blocking signalfd for one signal.
pub fn signalfd(signal: u32) -> Result<Fd> {
    let mask: u64 = 1 << (signal - 1);
    call!(
        nr::SIGNALFD4,
        -1isize,
        &mask as *const u64,
        8,
        O_NONBLOCK | O_CLOEXEC
    )
    .map(|fd| Fd::own(fd as i32))
}

/// Replaces the signal mask.
pub fn set_signal_mask(mask: u64) {
    const SIG_SETMASK: usize = 2;
    let _ = call!(nr::RT_SIGPROCMASK, SIG_SETMASK, &mask as *const u64, 0, 8);
}

/// Gives every signal its default disposition; what was ignored at exec would stay so in children.
pub fn reset_signal_dispositions() {
    let action = [0usize; 4];
    for signal in 1..=64 {
        let _ = call!(nr::RT_SIGACTION, signal, action.as_ptr(), 0, 8);
    }
}

fn clock(id: u32) -> u64 {
    let mut time = [0i64; 2];
    let _ = call!(nr::CLOCK_GETTIME, id, time.as_mut_ptr());
    time[0] as u64 * 1_000_000 + time[1] as u64 / 1000
}

/// Microseconds of the monotonic clock.
pub fn now_us() -> u64 {
    clock(CLOCK_MONOTONIC)
}

/// Milliseconds since 1970.
pub fn wall_ms() -> u64 {
    clock(CLOCK_REALTIME) / 1000
}
