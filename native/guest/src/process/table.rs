//! The table of processes: the living ones and a bounded number of ended ones with their results.

use super::cgroup::Leaf;
use super::ring::Ring;
use super::stdin::Stdin;
use crate::sys::Fd;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::string::String;
use alloc::vec::Vec;
use dsec_wire::Encoder;

/// Ended processes kept at most.
const RETAINED: usize = 256;
/// Bytes of a command line that the table keeps for `ps`.
const ARGV_BYTES: usize = 1024;
/// Bytes of memory an entry costs beside its output, for the budget.
const ENTRY_BYTES: u64 = 1024;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    Exit,
    Signal,
    Oom,
    Timeout,
    Killed,
}

impl Reason {
    fn name(self) -> &'static str {
        match self {
            Reason::Exit => "exit",
            Reason::Signal => "signal",
            Reason::Oom => "oom",
            Reason::Timeout => "timeout",
            Reason::Killed => "killed",
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Forked; whether the exec succeeds is not known yet.
    Starting,
    Running,
    /// The main process is reaped; what it left in its pipes is being read.
    Draining,
    Ended,
}

/// One output pipe with what came out of it.
pub struct Out {
    pub fd: Option<Fd>,
    pub ring: Ring,
    /// Whether the event loop watches the pipe now.
    pub armed: bool,
    /// After the main process's end: bytes still to read before the result may go out.
    pub drain: usize,
}

/// How a process ended.
#[derive(Clone, Copy, Debug)]
pub struct Ending {
    pub exit: Option<i32>,
    pub signal: Option<i32>,
    pub reason: Reason,
    pub totals: [u64; 2],
    pub gaps: [Option<(u64, u64)>; 2],
    pub dur_us: u64,
    pub cpu_us: u64,
    pub peak: u64,
    pub oom_kills: u64,
}

pub struct Proc {
    pub id: String,
    pub rid: Option<String>,
    pub argv: Vec<Vec<u8>>,
    pub user: String,
    pub pid: i32,
    pub alive: bool,
    pub start: bool,
    pub started_ms: u64,
    pub started_us: u64,
    pub deadline: Option<u64>,
    pub phase: Phase,
    pub status: Option<Fd>,
    pub outs: [Out; 2],
    pub stdin: Stdin,
    pub leaf: Option<Leaf>,
    /// Whether `leaf`'s events are watched (children outlive the main process).
    pub lingering: bool,
    /// After a tree kill: until when to wait for the leaf to become empty.
    pub empty_by: Option<u64>,
    /// Until then, or until the first reader came, a started process is held back rather than its output dropped.
    pub hold_until: Option<u64>,
    pub killed_for: Option<Reason>,
    pub oom_before: u64,
    pub ending: Option<Ending>,
    /// Streams that want the result.
    pub waiters: Vec<u32>,
    /// Streams that read the output.
    pub readers: Vec<u32>,
    /// No longer in the table; kept only while children linger.
    pub forgotten: bool,
}

impl Proc {
    /// Encodes the result map, with the output inside if it is given.
    pub fn result(&self, ending: &Ending, inline: Option<[&[u8]; 2]>) -> Vec<u8> {
        let mut e = Encoder::new();
        self.put_result(&mut e, ending, inline);
        e.out
    }

    fn put_result(&self, e: &mut Encoder, ending: &Ending, inline: Option<[&[u8]; 2]>) {
        e.map(12 + if inline.is_some() { 2 } else { 0 });
        e.str("exit");
        optional(e, ending.exit);
        e.str("signal");
        optional(e, ending.signal);
        e.str("reason")
            .str(ending.reason.name())
            .str("pid")
            .int(i64::from(self.pid));
        for (i, (total, gap)) in [("out_total", "out_gap"), ("err_total", "err_gap")]
            .into_iter()
            .enumerate()
        {
            e.str(total).uint(ending.totals[i]).str(gap);
            match ending.gaps[i] {
                Some((from, to)) => e.array(2).uint(from).uint(to),
                None => e.nil(),
            };
        }
        e.str("dur_us")
            .uint(ending.dur_us)
            .str("cpu_us")
            .uint(ending.cpu_us);
        e.str("peak")
            .uint(ending.peak)
            .str("oom_kills")
            .uint(ending.oom_kills);
        if let Some([out, err]) = inline {
            e.str("out").bin(out).str("err").bin(err);
        }
    }

    /// Encodes the entry of `ps`.
    pub fn describe(&self) -> Vec<u8> {
        let mut e = Encoder::new();
        e.map(8)
            .str("id")
            .str(&self.id)
            .str("pid")
            .int(i64::from(self.pid))
            .str("argv")
            .array(self.argv.len());
        for word in &self.argv {
            e.bin(word);
        }
        let ended = self.phase == Phase::Ended;
        e.str("user")
            .str(&self.user)
            .str("state")
            .str(if ended { "ended" } else { "running" });
        e.str("started_ms").uint(self.started_ms).str("rid");
        match &self.rid {
            Some(rid) => e.str(rid),
            None => e.nil(),
        };
        e.str("result");
        match &self.ending {
            Some(ending) => self.put_result(&mut e, ending, None),
            None => {
                e.nil();
            }
        }
        e.out
    }

    fn cost(&self) -> u64 {
        ENTRY_BYTES
            + self
                .outs
                .iter()
                .map(|out| out.ring.held() as u64)
                .sum::<u64>()
    }

    /// Whether nothing of it is alive any more.
    fn released(&self) -> bool {
        self.phase == Phase::Ended
            && self.leaf.is_none()
            && self.outs.iter().all(|out| out.fd.is_none())
    }
}

fn optional(e: &mut Encoder, n: Option<i32>) {
    match n {
        Some(n) => e.int(i64::from(n)),
        None => e.nil(),
    };
}

/// The command line as the table keeps it: cut to about a kibibyte.
pub fn short_argv(words: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut left = ARGV_BYTES;
    let mut out = Vec::new();
    for word in words.iter().take(64) {
        let n = word.len().min(left);
        out.push(word[..n].to_vec());
        left -= n;
        if left == 0 {
            break;
        }
    }
    out
}

#[derive(Default)]
pub struct Table {
    procs: BTreeMap<u64, Proc>,
    next: u64,
    by_pid: BTreeMap<i32, u64>,
    /// Ended ones in the table, oldest first.
    ended: VecDeque<u64>,
}

impl Table {
    pub fn insert(&mut self, proc: Proc) -> u64 {
        self.next += 1;
        self.by_pid.insert(proc.pid, self.next);
        self.procs.insert(self.next, proc);
        self.next
    }

    pub fn get(&self, key: u64) -> Option<&Proc> {
        self.procs.get(&key)
    }

    pub fn get_mut(&mut self, key: u64) -> Option<&mut Proc> {
        self.procs.get_mut(&key)
    }

    pub fn keys(&self) -> Vec<u64> {
        self.procs.keys().copied().collect()
    }

    pub fn iter(&self) -> impl Iterator<Item = (u64, &Proc)> {
        self.procs.iter().map(|(key, proc)| (*key, proc))
    }

    /// Bytes of memory that all output takes.
    pub fn output_held(&self) -> u64 {
        let rings = self.procs.values().flat_map(|proc| &proc.outs);
        rings.map(|out| out.ring.held() as u64).sum()
    }

    /// The main process `pid` was reaped: whose was it?
    pub fn reaped(&mut self, pid: i32) -> Option<u64> {
        self.by_pid.remove(&pid)
    }

    pub fn find(&self, id: &str) -> Option<u64> {
        self.iter()
            .find(|(_, p)| !p.forgotten && p.id == id)
            .map(|(key, _)| key)
    }

    pub fn find_rid(&self, rid: &str) -> Option<u64> {
        self.iter()
            .find(|(_, p)| !p.forgotten && p.rid.as_deref() == Some(rid))
            .map(|(key, _)| key)
    }

    pub fn find_pid(&self, pid: i32) -> Option<u64> {
        self.by_pid.get(&pid).copied()
    }

    /// Whether the child has not become the command yet.
    pub fn is_starting(&self, key: u64) -> bool {
        self.get(key).is_some_and(|p| p.phase == Phase::Starting)
    }

    /// Processes that are not ended, and ended ones whose children live.
    pub fn busy(&self) -> usize {
        self.iter().filter(|(_, p)| !p.released()).count()
    }

    /// Enters an ended process among the retained and forgets the oldest beyond the bounds.
    pub fn retain(&mut self, key: u64, byte_limit: u64) {
        self.ended.push_back(key);
        loop {
            let bytes: u64 = self
                .ended
                .iter()
                .filter_map(|k| self.procs.get(k))
                .map(Proc::cost)
                .sum();
            let over = self.ended.len() > RETAINED || bytes > byte_limit.max(ENTRY_BYTES * 16);
            // One that somebody is reading is kept; it will be looked at again with the next end.
            let idle = |k: &&u64| {
                self.procs
                    .get(*k)
                    .is_none_or(|p| p.readers.is_empty() && p.waiters.is_empty())
            };
            match self.ended.iter().find(idle).copied() {
                Some(oldest) if over && (oldest != key || self.ended.len() > 1) => {
                    self.forget(oldest)
                }
                _ => return,
            }
        }
    }

    /// Drops the entry and its output; a process whose children live only becomes invisible.
    pub fn forget(&mut self, key: u64) {
        self.ended.retain(|k| *k != key);
        if let Some(proc) = self.procs.get_mut(&key) {
            proc.forgotten = true;
            proc.outs.iter_mut().for_each(|out| out.ring.discard());
            self.sweep(key);
        }
    }

    /// Removes a forgotten entry once nothing of it lives.
    pub fn sweep(&mut self, key: u64) {
        if self
            .procs
            .get(&key)
            .is_some_and(|p| p.forgotten && p.released())
        {
            if let Some(proc) = self.procs.remove(&key) {
                if self.by_pid.get(&proc.pid) == Some(&key) {
                    self.by_pid.remove(&proc.pid);
                }
            }
        }
    }

    /// Removes a process that never started.
    pub fn remove(&mut self, key: u64) -> Option<Proc> {
        self.ended.retain(|k| *k != key);
        let proc = self.procs.remove(&key)?;
        if self.by_pid.get(&proc.pid) == Some(&key) {
            self.by_pid.remove(&proc.pid);
        }
        Some(proc)
    }
}
