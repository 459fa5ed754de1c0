//! A run from its request to the release of all it held.

use super::cgroup;
use super::child::{self, Ends, Step};
use super::request::{ExecRequest, Program};
use super::ring::Ring;
use super::stdin::Stdin;
use super::table::{short_argv, Ending, Out, Phase, Proc, Reason};
use crate::agent::{Agent, Source};
use crate::reply::{Failure, Outcome};
use crate::streams::{Kind, Reader, Stream};
use crate::sys::consts::*;
use crate::sys::{event, io, task, Errno, Fd};
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use dsec_wire::{frame, Encoder, Value};

/// Output of both streams together that goes inside the result map.
/// A reader that follows a start comes within this, or does not mean to.
const HOLD_US: u64 = 2_000_000;
const INLINE: u64 = 49_152;
/// After a tree kill: how long to wait for the cgroup to become empty before answering anyway.
const EMPTY_US: u64 = 2_000_000;
/// How often to look while waiting for that.
const EMPTY_POLL_MS: i32 = 1;

impl Agent {
    pub fn method_exec(&mut self, stream: u32, map: &Value<'_>, fin: bool) -> Outcome<()> {
        let request = ExecRequest::parse(map)?;
        let known = request
            .rid
            .as_deref()
            .and_then(|rid| self.table.find_rid(rid));
        let key = match known {
            Some(key) => key,
            None => {
                if self.table.find(&request.id).is_some() {
                    return Err(Failure::new(
                        "exists",
                        alloc::format!("a process with the id {:?} exists", request.id),
                    ));
                }
                self.start_run(&request)?
            }
        };
        let kind = if request.start {
            Kind::Start {
                proc: key,
                written: 0,
            }
        } else {
            Kind::Exec { proc: key }
        };
        self.streams.insert(stream, Stream::new(kind));
        let Some(proc) = self.table.get_mut(key) else {
            return Ok(());
        };
        proc.waiters.push(stream);
        let phase = proc.phase;
        if request.start && phase != Phase::Starting {
            self.tell_started(key);
        } else if phase == Phase::Ended {
            self.deliver(key);
        }
        if fin {
            self.data(stream, &[], true);
        }
        Ok(())
    }

    /// Forks the child and enters it in the table.
    fn start_run(&mut self, request: &ExecRequest) -> Outcome<u64> {
        if self.table.busy() >= self.config.max_processes {
            let text = alloc::format!(
                "{} processes are running already",
                self.config.max_processes
            );
            return Err(Failure::new("too_many", text));
        }
        let leaf = self.cgroups.take(self.config.run_pids).map_err(|e| {
            Failure::kernel(e, "cannot make a cgroup for the command").coded("exec_failed")
        })?;
        let made = self.fork_run(request, leaf.as_ref());
        let (pid, status, [stdout, stderr], stdin) = match made {
            Ok(made) => made,
            Err((errno, what)) => {
                if let Some(leaf) = leaf {
                    self.cgroups.give(leaf);
                }
                return Err(Failure::kernel(errno, what).coded("exec_failed"));
            }
        };
        let out = |fd| Out {
            fd: Some(fd),
            ring: Ring::new(request.cap),
            armed: false,
            drain: 0,
        };
        let started_us = event::now_us();
        let key = self.table.insert(Proc {
            id: request.id.clone(),
            rid: request.rid.clone(),
            argv: match &request.program {
                Program::Argv(words) => short_argv(words),
                Program::Shell(text) => {
                    short_argv(&[b"/bin/sh".to_vec(), b"-c".to_vec(), text.clone()])
                }
            },
            user: request
                .user
                .clone()
                .or_else(|| self.config.user.clone())
                .unwrap_or_else(|| "root".to_string()),
            pid,
            alive: true,
            start: request.start,
            started_ms: event::wall_ms(),
            started_us,
            deadline: request
                .timeout_ms
                .map(|ms| started_us.saturating_add(ms.saturating_mul(1000))),
            phase: Phase::Starting,
            status: Some(status),
            outs: [out(stdout), out(stderr)],
            stdin: Stdin::new(stdin),
            leaf,
            lingering: false,
            empty_by: None,
            hold_until: (request.start && request.cap > 0).then_some(started_us + HOLD_US),
            killed_for: None,
            oom_before: cgroup::oom_kills(self.oom.as_ref()),
            ending: None,
            waiters: Vec::new(),
            readers: Vec::new(),
            forgotten: false,
        });
        self.watch_new(key);
        Ok(key)
    }

    /// Makes the pipes and forks. On success: pid, status pipe, output pipes, stdin pipe.
    #[allow(clippy::type_complexity)]
    fn fork_run(
        &self,
        request: &ExecRequest,
        leaf: Option<&cgroup::Leaf>,
    ) -> Result<(i32, Fd, [Fd; 2], Option<Fd>), (Errno, &'static str)> {
        let pipes = |e| (e, "cannot make pipes for the command");
        let (out_read, out_write) = io::pipe(0).map_err(pipes)?;
        let (err_read, err_write) = io::pipe(0).map_err(pipes)?;
        let (status_read, status_write) = io::pipe(O_NONBLOCK).map_err(pipes)?;
        let stdin = if request.stdin {
            Some(io::pipe(0).map_err(pipes)?)
        } else {
            None
        };
        // Only our ends: the flag belongs to the open file, and a command expects blocking pipes.
        for fd in [
            Some(&out_read),
            Some(&err_read),
            stdin.as_ref().map(|(_, w)| w),
        ]
        .into_iter()
        .flatten()
        {
            io::set_nonblocking(fd.raw()).map_err(pipes)?;
        }
        let ends = Ends {
            stdin: stdin.as_ref().map(|(r, _)| r.raw()),
            stdout: out_write.raw(),
            stderr: err_write.raw(),
            status: status_write.raw(),
            procs: leaf.map(cgroup::Leaf::procs),
            tasks: leaf.and_then(cgroup::Leaf::tasks),
        };
        match task::fork() {
            Ok(0) => child::run(request, &self.config, &self.around, &ends),
            Ok(pid) => Ok((
                pid,
                status_read,
                [out_read, err_read],
                stdin.map(|(_, write)| write),
            )),
            Err(errno) => Err((errno, "cannot start a process")),
        }
    }

    fn watch_new(&mut self, key: u64) {
        if let Some(status) = self.table.get(key).and_then(|p| p.status.as_ref()) {
            let _ = self
                .epoll
                .add(status.raw(), EPOLLIN, Source::Status.token(key));
        }
        self.resume_reading(key);
    }

    /// The status pipe says how the start went: closed by the exec, or with a report of what failed.
    pub fn status_ready(&mut self, key: u64) {
        let Some(proc) = self.table.get_mut(key) else {
            return;
        };
        let Some(status) = proc.status.take() else {
            return;
        };
        let mut report = [0u8; 256];
        match io::read(status.raw(), &mut report) {
            Err(Errno::EAGAIN | Errno::EINTR) => proc.status = Some(status),
            Ok(n) if n >= 5 => {
                let errno = Errno(i32::from_le_bytes([
                    report[1], report[2], report[3], report[4],
                ]));
                let text = String::from_utf8_lossy(&report[5..n]);
                let failure = start_failure(Step::from_byte(report[0]), errno, &text);
                self.start_failed(key, &failure);
            }
            _ => {
                proc.phase = Phase::Running;
                self.tell_started(key);
            }
        }
    }

    /// Answers those who wait for a `start`.
    fn tell_started(&mut self, key: u64) {
        let Some(proc) = self.table.get_mut(key) else {
            return;
        };
        let has_stdin = proc.stdin.is_open();
        let mut e = Encoder::new();
        e.map(1).str("pid").int(i64::from(proc.pid));
        let waiters = core::mem::take(&mut proc.waiters);
        for stream in waiters {
            match self.streams.get_mut(stream).map(|s| &s.kind) {
                Some(Kind::Start { .. }) if has_stdin => {
                    self.channel.put(stream, frame::MSG, &e.out)
                }
                Some(Kind::Start { .. }) => self.finish(stream, &e.out),
                Some(_) => {
                    if let Some(proc) = self.table.get_mut(key) {
                        proc.waiters.push(stream);
                    }
                }
                None => {}
            }
        }
    }

    /// The child could not become the command: it is not a process of the table then.
    fn start_failed(&mut self, key: u64, failure: &Failure) {
        let Some(mut proc) = self.table.remove(key) else {
            return;
        };
        for stream in proc.waiters.drain(..).chain(proc.readers.drain(..)) {
            self.streams.remove(stream);
            self.channel.put(stream, frame::RESET, &failure.encode());
        }
        // It is about to exit by itself; a child stopped before that must not stay.
        let _ = task::kill(proc.pid, SIGKILL);
        if let Some(leaf) = proc.leaf.take() {
            let _ = leaf.kill();
            self.closing.push(leaf);
        }
    }

    /// Gives leaves back whose last process has gone since.
    pub fn collect_leaves(&mut self) {
        let mut i = 0;
        while i < self.closing.len() {
            if self.closing[i].populated() {
                i += 1;
            } else {
                let leaf = self.closing.swap_remove(i);
                self.cgroups.give(leaf);
            }
        }
    }

    pub fn main_died(&mut self, key: u64, ended: &task::Ended) {
        if self.table.get(key).is_some_and(|p| p.status.is_some()) {
            self.status_ready(key);
        }
        let oom_now = cgroup::oom_kills(self.oom.as_ref());
        let Some(proc) = self.table.get_mut(key) else {
            return;
        };
        proc.alive = false;
        proc.status = None;
        proc.deadline = None;
        let signal = ended.status & 0x7f;
        let (exit, signal) = if signal == 0 {
            (Some(ended.status >> 8 & 0xff), None)
        } else {
            (None, Some(signal))
        };
        let oom_kills = oom_now.saturating_sub(proc.oom_before);
        let reason = match proc.killed_for {
            Some(reason) if signal == Some(SIGKILL as i32) || reason == Reason::Timeout => reason,
            _ if oom_kills > 0 && (signal == Some(SIGKILL as i32) || exit == Some(137)) => {
                Reason::Oom
            }
            _ if signal.is_some() => Reason::Signal,
            _ => Reason::Exit,
        };
        let dur_us = event::now_us() - proc.started_us;
        proc.ending = Some(Ending {
            exit,
            signal,
            reason,
            totals: [0; 2],
            gaps: [None; 2],
            dur_us,
            cpu_us: ended.cpu_us,
            peak: ended.peak_bytes,
            oom_kills,
        });
        proc.empty_by = proc.killed_for.map(|_| event::now_us() + EMPTY_US);
        self.after_death(key);
    }

    /// Once the killed tree is gone (at once, if nothing was killed): what is in the pipes now is the rest of the output.
    fn after_death(&mut self, key: u64) {
        let Some(proc) = self.table.get_mut(key) else {
            return;
        };
        let populated = proc
            .leaf
            .as_ref()
            .is_some_and(super::cgroup::Leaf::populated);
        if populated && proc.empty_by.is_some_and(|by| event::now_us() < by) {
            return;
        }
        proc.empty_by = None;
        proc.phase = Phase::Draining;
        let alone = proc.leaf.is_some() && !populated;
        for out in &mut proc.outs {
            // With nobody left to write, everything up to the end of file belongs to it.
            out.drain = match &out.fd {
                Some(_) if alone => usize::MAX,
                Some(fd) => io::bytes_readable(fd.raw()).unwrap_or(0),
                None => 0,
            };
        }
        let credits = proc.stdin.close();
        for (stream, n) in credits {
            self.grant(stream, n);
        }
        self.end_stdin_streams(key);
        for channel in 0..2 {
            self.drain_output(key, channel);
        }
        self.try_finalise(key);
    }

    /// The result is complete once the rest of the output is read.
    pub fn try_finalise(&mut self, key: u64) {
        let Some(proc) = self.table.get_mut(key) else {
            return;
        };
        if proc.phase != Phase::Draining || proc.outs.iter().any(|out| out.drain > 0) {
            return;
        }
        proc.phase = Phase::Ended;
        let totals = [proc.outs[0].ring.total(), proc.outs[1].ring.total()];
        let gaps = [proc.outs[0].ring.gap(), proc.outs[1].ring.gap()];
        if let Some(ending) = &mut proc.ending {
            (ending.totals, ending.gaps) = (totals, gaps);
        }
        self.release(key);
        // Nobody can ask again for a run that has no request id and whose result is delivered now.
        let asked = self
            .table
            .get(key)
            .is_some_and(|p| p.rid.is_none() && !p.start && !p.waiters.is_empty());
        self.deliver(key);
        if asked && self.table.get(key).is_some_and(|p| p.readers.is_empty()) {
            self.table.forget(key);
        } else {
            self.table.retain(key, self.config.retain_limit());
        }
    }

    /// Gives the result to all who wait for it.
    fn deliver(&mut self, key: u64) {
        let Some(proc) = self.table.get_mut(key) else {
            return;
        };
        let Some(ending) = proc.ending else { return };
        let waiters = core::mem::take(&mut proc.waiters);
        let kept: u64 = proc.outs.iter().map(|out| out.ring.kept()).sum();
        for stream in waiters {
            let Some(proc) = self.table.get(key) else {
                return;
            };
            let is_exec = matches!(
                self.streams.get_mut(stream).map(|s| &s.kind),
                Some(Kind::Exec { .. })
            );
            if !is_exec {
                let result = proc.result(&ending, None);
                self.finish(stream, &result);
            } else if kept <= INLINE && !self.channel.is_full() {
                let [out, err] = [&proc.outs[0].ring, &proc.outs[1].ring].map(Ring::to_vec);
                let result = proc.result(&ending, Some([&out, &err]));
                self.finish(stream, &result);
            } else {
                let reader = Reader {
                    proc: key,
                    next: [0; 2],
                    end: Some(ending.totals),
                    tell_gaps: false,
                };
                if let Some(open) = self.streams.get_mut(stream) {
                    open.kind = Kind::Output(reader);
                }
                if let Some(proc) = self.table.get_mut(key) {
                    proc.readers.push(stream);
                }
            }
        }
    }

    /// Lets go of what an ended run no longer needs; children that live on keep their cgroup and pipes.
    fn release(&mut self, key: u64) {
        let Some(proc) = self.table.get_mut(key) else {
            return;
        };
        if let Some(leaf) = proc.leaf.take() {
            if leaf.populated() {
                if !proc.lingering {
                    proc.lingering = self
                        .epoll
                        .add(leaf.events(), EPOLLPRI, Source::Leaf.token(key))
                        .is_ok();
                }
                proc.leaf = Some(leaf);
                self.resume_reading(key);
                return;
            }
            if proc.lingering {
                self.epoll.del(leaf.events());
                proc.lingering = false;
            }
            self.cgroups.give(leaf);
            for out in &mut proc.outs {
                out.fd = None;
            }
        } else {
            // Without cgroups the end of file tells that all children are gone.
            self.resume_reading(key);
        }
        self.table.sweep(key);
    }

    /// The kernel says that a leaf became empty (or not): lingering children have gone.
    pub fn leaf_changed(&mut self, key: u64) {
        let Some(proc) = self.table.get(key) else {
            return;
        };
        if proc.phase == Phase::Ended && proc.leaf.as_ref().is_some_and(|leaf| !leaf.populated()) {
            for channel in 0..2 {
                self.drain_rest(key, channel);
            }
            self.release(key);
        }
    }

    /// Kills the whole tree of a run; the result will say why.
    pub fn kill_run(&mut self, key: u64, reason: Reason) {
        let Some(proc) = self.table.get_mut(key) else {
            return;
        };
        if proc.alive {
            proc.killed_for = Some(reason);
        }
        cgroup::kill_tree(proc.leaf.as_ref(), proc.pid, proc.alive);
    }

    /// Milliseconds until something is due; i32::MAX if nothing is.
    pub fn timeout_ms(&self) -> i32 {
        let waits = self.streams.iter().filter_map(|(_, s)| match s.kind {
            Kind::Wait { deadline, .. } => deadline,
            _ => None,
        });
        let due = self
            .table
            .iter()
            .flat_map(|(_, p)| [p.deadline, p.hold_until])
            .flatten()
            .chain(waits)
            .min();
        let polling =
            !self.closing.is_empty() || self.table.iter().any(|(_, p)| p.empty_by.is_some());
        let until = due.map_or(i32::MAX, |at| {
            (at.saturating_sub(event::now_us()).div_ceil(1000)).min(1 << 30) as i32
        });
        if polling {
            until.min(EMPTY_POLL_MS)
        } else {
            until
        }
    }

    pub fn expire(&mut self) {
        self.collect_leaves();
        let now = event::now_us();
        for key in self.table.keys() {
            let Some(proc) = self.table.get_mut(key) else {
                continue;
            };
            if proc.deadline.is_some_and(|at| at <= now) {
                proc.deadline = None;
                self.kill_run(key, Reason::Timeout);
            } else if proc.empty_by.is_some() {
                self.after_death(key);
            }
            self.end_hold(key, now);
        }
        let late: Vec<(u32, u64)> = self
            .streams
            .iter()
            .filter_map(|(id, s)| match s.kind {
                Kind::Wait {
                    proc,
                    deadline: Some(at),
                } if at <= now => Some((id, proc)),
                _ => None,
            })
            .collect();
        for (stream, key) in late {
            if let Some(proc) = self.table.get_mut(key) {
                proc.waiters.retain(|s| *s != stream);
            }
            self.finish(stream, &running());
        }
    }
}

/// The answer about a process that has not ended.
pub fn running() -> Vec<u8> {
    let mut e = Encoder::new();
    e.map(1).str("running").bool(true);
    e.out
}

/// The failure that a report of the child stands for.
fn start_failure(step: Option<Step>, errno: Errno, text: &str) -> Failure {
    match step {
        Some(Step::User) => Failure::new("not_found", text),
        Some(Step::Cwd) => Failure::kernel(
            errno,
            &alloc::format!("cannot change to the directory {text}"),
        )
        .at(text.as_bytes()),
        Some(Step::Exec) => {
            let failure = Failure::kernel(errno, &alloc::format!("cannot execute {text}"))
                .at(text.as_bytes());
            match errno {
                Errno::ENOENT | Errno::EACCES | Errno::EPERM => failure,
                Errno::E2BIG => failure.coded("invalid"),
                Errno::ENOTDIR => failure.coded("not_found"),
                _ => failure.coded("exec_failed"),
            }
        }
        Some(Step::Interpreter) => {
            let text =
                alloc::format!("cannot execute {text}: its interpreter or loader is missing");
            Failure {
                errno: Some(errno),
                ..Failure::new("exec_failed", text)
            }
        }
        Some(Step::Cgroup) => {
            Failure::kernel(errno, "cannot enter the command's pids cgroup").coded("exec_failed")
        }
        Some(Step::Namespace) => {
            Failure::kernel(errno, "cannot join the sandbox's user namespace").coded("exec_failed")
        }
        Some(Step::Identity) => {
            Failure::kernel(errno, "cannot take the user's identity").coded("exec_failed")
        }
        Some(Step::Stdio) | None => {
            Failure::kernel(errno, "cannot set up the command's standard streams")
                .coded("exec_failed")
        }
    }
}
