//! The cgroup leaves of runs: made on demand, reused when empty.

use crate::sys::consts::*;
use crate::sys::{fs, io, task, Errno, Fd, Result};
use alloc::ffi::CString;
use alloc::vec::Vec;
use core::ffi::CStr;

/// Empty leaves kept for the next runs.
const POOL: usize = 16;

pub struct Leaf {
    name: CString,
    dir: Fd,
    /// `cgroup.events`, kept open: read at the end of each run, polled while children linger.
    events: Fd,
    /// `cgroup.procs`, which a child writes itself into.
    procs: Fd,
    /// The v1 `tasks` file that a child writes itself into.
    tasks: Option<Fd>,
    pids_max: Option<u64>,
}

impl Leaf {
    pub fn procs(&self) -> i32 {
        self.procs.raw()
    }

    pub fn events(&self) -> i32 {
        self.events.raw()
    }

    pub fn tasks(&self) -> Option<i32> {
        self.tasks.as_ref().map(Fd::raw)
    }

    /// Whether a living process is inside.
    pub fn populated(&self) -> bool {
        let mut buf = [0u8; 128];
        let n = io::pread(self.events.raw(), &mut buf, 0).unwrap_or(0);
        !buf[..n].windows(11).any(|w| w == b"populated 0")
    }

    /// Kills every process inside, whatever it did to its session.
    pub fn kill(&self) -> Result<()> {
        write_file(self.dir.raw(), c"cgroup.kill", b"1")
    }
}

fn write_file(dir: i32, name: &CStr, data: &[u8]) -> Result<()> {
    let file = fs::openat(dir, name, O_WRONLY, 0)?;
    io::write(file.raw(), data).map(drop)
}

/// Both hierarchies that the launcher handed over.
pub struct Cgroups {
    runs: Option<Fd>,
    pids: Option<Fd>,
    free: Vec<Leaf>,
    next: u32,
}

impl Cgroups {
    pub fn new(runs: Option<Fd>, pids: Option<Fd>) -> Cgroups {
        Cgroups {
            runs,
            pids,
            free: Vec::new(),
            next: 0,
        }
    }

    /// A leaf for one run with its process limit set; None where the host gave no cgroup directory.
    pub fn take(&mut self, pids_max: Option<u64>) -> Result<Option<Leaf>> {
        if self.runs.is_none() {
            return Ok(None);
        }
        // In turn, so that every leaf that became empty is used again.
        let mut leaf = if self.free.is_empty() {
            self.make()?
        } else {
            self.free.remove(0)
        };
        if leaf.pids_max != pids_max {
            self.limit(&leaf, pids_max)?;
            leaf.pids_max = pids_max;
        }
        Ok(Some(leaf))
    }

    fn make(&mut self) -> Result<Leaf> {
        let runs = self.runs.as_ref().ok_or(Errno::ENOENT)?.raw();
        for _ in 0..65_536 {
            let name =
                CString::new(alloc::format!("run-{}", self.next)).map_err(|_| Errno::EINVAL)?;
            self.next = self.next.wrapping_add(1);
            match make_anew(runs, &name) {
                Err(Errno::EBUSY) => continue,
                other => other?,
            }
            let dir = fs::openat(runs, &name, O_RDONLY | O_DIRECTORY, 0)?;
            let events = fs::openat(dir.raw(), c"cgroup.events", O_RDONLY, 0)?;
            let procs = fs::openat(dir.raw(), c"cgroup.procs", O_WRONLY, 0)?;
            let mut leaf = Leaf {
                name,
                dir,
                events,
                procs,
                tasks: None,
                pids_max: None,
            };
            if let Some(pids) = &self.pids {
                match make_anew(pids.raw(), &leaf.name) {
                    Err(Errno::EBUSY) => continue,
                    other => other?,
                }
                let dir = fs::openat(pids.raw(), &leaf.name, O_PATH | O_DIRECTORY, 0)?;
                leaf.tasks = Some(fs::openat(dir.raw(), c"tasks", O_WRONLY, 0)?);
            }
            return Ok(leaf);
        }
        Err(Errno::EBUSY)
    }

    fn limit(&self, leaf: &Leaf, pids_max: Option<u64>) -> Result<()> {
        let text = pids_max.map_or_else(
            || alloc::string::String::from("max"),
            |n| alloc::format!("{n}"),
        );
        let written = match &self.pids {
            Some(pids) => {
                let dir = fs::openat(pids.raw(), &leaf.name, O_PATH | O_DIRECTORY, 0)?;
                write_file(dir.raw(), c"pids.max", text.as_bytes())
            }
            None => write_file(leaf.dir.raw(), c"pids.max", text.as_bytes()),
        };
        match written {
            // No pids controller here: then there is no limit to lift.
            Err(Errno::ENOENT) if pids_max.is_none() => Ok(()),
            other => other,
        }
    }

    /// Takes an empty leaf back.
    pub fn give(&mut self, leaf: Leaf) {
        if self.free.len() < POOL {
            self.free.push(leaf);
            return;
        }
        let name = leaf.name.clone();
        drop(leaf);
        for dir in [&self.runs, &self.pids].into_iter().flatten() {
            let _ = fs::unlinkat(dir.raw(), &name, AT_REMOVEDIR);
        }
    }
}

/// Makes a cgroup. One that an earlier tenant of the slot left is replaced; EBUSY if it is in use.
fn make_anew(dir: i32, name: &CStr) -> Result<()> {
    match fs::mkdirat(dir, name, 0o755) {
        Err(Errno::EEXIST) => {
            fs::unlinkat(dir, name, AT_REMOVEDIR)?;
            fs::mkdirat(dir, name, 0o755)
        }
        other => other,
    }
}

/// Kills a run: its cgroup, or where there is none its session's process group, and the main process.
pub fn kill_tree(leaf: Option<&Leaf>, pid: i32, alive: bool) {
    let killed = leaf.is_some_and(|leaf| leaf.kill().is_ok());
    if alive {
        if !killed {
            let _ = task::kill(-pid, SIGKILL);
        }
        // Also with a cgroup: a child that was just forked may not have entered it yet.
        let _ = task::kill(pid, SIGKILL);
    }
}

/// The OOM kill counter of the sandbox: the `oom_kill` line of either cgroup generation's file.
pub fn oom_kills(fd: Option<&Fd>) -> u64 {
    let Some(fd) = fd else { return 0 };
    let mut buf = [0u8; 512];
    let n = io::pread(fd.raw(), &mut buf, 0).unwrap_or(0);
    buf[..n]
        .split(|b| *b == b'\n')
        .find_map(|line| line.strip_prefix(b"oom_kill "))
        .and_then(|count| core::str::from_utf8(count).ok()?.trim().parse().ok())
        .unwrap_or(0)
}
