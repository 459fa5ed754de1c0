//! From the kernel's hand-over to the agent's loop.

use crate::agent::Agent;
use crate::process::cgroup::Cgroups;
use crate::process::child::Surroundings;
use crate::sys::consts::*;
use crate::sys::{event, fs, io, task, Fd};
use core::fmt::Write;

/// Words of the command line at most.
const MAX_WORDS: usize = 16;

/// The words after the program's name, kept without allocation.
pub struct Words {
    words: [&'static [u8]; MAX_WORDS],
    count: usize,
}

impl Words {
    pub const fn new() -> Words {
        Words {
            words: [&[]; MAX_WORDS],
            count: 0,
        }
    }

    pub fn push(&mut self, word: &'static [u8]) {
        if self.count < MAX_WORDS {
            self.words[self.count] = word;
            self.count += 1;
        }
    }

    /// The descriptor given as `name=NUMBER`, now ours and close-on-exec.
    fn descriptor(&self, name: &[u8]) -> Option<Fd> {
        let text = self.words[..self.count]
            .iter()
            .find_map(|w| w.strip_prefix(name)?.strip_prefix(b"="))?;
        let raw: i32 = core::str::from_utf8(text).ok()?.parse().ok()?;
        // 0, 1 and 2 will be other things.
        if raw < 3 {
            return io::dup_above(raw, 3).ok();
        }
        io::set_cloexec(raw).ok()?;
        Some(Fd::own(raw))
    }
}

impl Default for Words {
    fn default() -> Self {
        Self::new()
    }
}

/// Runs the guest; returns to nobody.
pub fn run(words: &Words) -> ! {
    let born_us = event::now_us();
    // Before anything else: nobody in the sandbox may read this process.
    task::set_dumpable(false);
    event::reset_signal_dispositions();
    // Everything is blocked for good: children unblock all of it, the agent hears of deaths by a
    // descriptor, and a broken pipe is just an error.
    event::set_signal_mask(u64::MAX);
    let Some(channel) = words.descriptor(b"channel") else {
        complain(format_args!(
            "usage: dsec-guest channel=FD [userns=FD] [runs=FD] [pids=FD] [oom=FD]"
        ));
        task::exit(64)
    };
    occupy_standard_descriptors();
    let own_nofile = task::get_rlimit(RLIMIT_NOFILE).unwrap_or([1024, 1024]);
    let _ = task::set_rlimit(RLIMIT_NOFILE, [own_nofile[1]; 2]);
    let around = Surroundings {
        userns: words.descriptor(b"userns"),
        proc_dir: fs::openat(AT_FDCWD, c"/proc", O_PATH | O_DIRECTORY, 0).ok(),
        own_nofile,
    };
    let cgroups = Cgroups::new(words.descriptor(b"runs"), words.descriptor(b"pids"));
    match Agent::new(channel, around, cgroups, words.descriptor(b"oom"), born_us) {
        Ok(mut agent) => agent.run(),
        Err(errno) => {
            complain(format_args!("cannot start: {} ({})", errno.text(), errno.0));
            task::exit(71)
        }
    }
    task::exit(0)
}

/// Makes sure that no pipe of ours ever gets the number of a standard stream.
fn occupy_standard_descriptors() {
    for raw in 0..3 {
        if !io::fd_is_open(raw) {
            if let Ok(fd) = fs::openat(AT_FDCWD, c"/", O_PATH, 0) {
                fd.into_raw();
            }
        }
    }
}

/// A line on standard error, cut to what fits a small buffer.
fn complain(what: core::fmt::Arguments<'_>) {
    struct Line([u8; 512], usize);
    impl Write for Line {
        fn write_str(&mut self, s: &str) -> core::fmt::Result {
            let n = s.len().min(self.0.len() - self.1);
            self.0[self.1..self.1 + n].copy_from_slice(&s.as_bytes()[..n]);
            self.1 += n;
            Ok(())
        }
    }
    let mut line = Line([0; 512], 0);
    let _ = writeln!(line, "dsec-guest: {what}");
    let _ = io::write(2, &line.0[..line.1]);
}

/// A bug: says where and ends the sandbox.
pub fn panicked(info: &core::panic::PanicInfo<'_>) -> ! {
    complain(format_args!("{info}"));
    task::exit(70)
}
