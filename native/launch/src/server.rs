//! The spawn server: one thread that owns the controller's connection and the record of every sandbox.
//!
//! It never blocks and never exits because a controller went away. Work on kernel objects happens in `pool`.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rmpv::Value;

use crate::engine::{Ending, Engine, Sandbox};
use crate::error::{Error, Result};
use crate::msg::{encode, map};
use crate::packet::{self, Received};
use crate::pool::{Done, Job, Pool};
use crate::reply;
use crate::sys;

const LISTENER: u64 = 0;
const CONTROLLER: u64 = 1;
const RESULTS: u64 = 2;
/// Tokens of sandboxes: `n * 2` for the pidfd, `n * 2 + 1` for the channel.
const FIRST_SANDBOX: u64 = 8;
/// Packets kept for a controller that does not read; a slower one loses its connection.
const MAX_QUEUE: usize = 4096;

pub(crate) enum Phase {
    Queued,
    /// The program runs; its first packet is awaited.
    Starting(Instant),
    Running,
    Ending,
}

pub(crate) struct Entry {
    pub id: String,
    pub tag: Vec<u8>,
    pub phase: Phase,
    pub sandbox: Option<Box<Sandbox>>,
    ready_ms: u64,
    /// The spawn request that waits for an answer: its seq and the item's index.
    spawn: Option<(u64, u64)>,
    /// Why the spawn fails once the clean-up is done.
    failure: Option<Error>,
    /// Kill requests that wait for the end.
    kills: Vec<u64>,
    /// Its controller went away before it was started: it ends as soon as it is.
    unwanted: bool,
}

/// A packet not yet accepted by the controller's socket, with its own copies of the descriptors.
struct Waiting {
    packet: Vec<u8>,
    fds: Vec<OwnedFd>,
}

pub struct Server {
    pub(crate) engine: Arc<Engine>,
    pub(crate) instance: String,
    pub(crate) entries: HashMap<u64, Entry>,
    pub(crate) ids: HashMap<String, u64>,
    pool: Pool,
    epoll: OwnedFd,
    listener: OwnedFd,
    controller: Option<OwnedFd>,
    queue: VecDeque<Waiting>,
    deadlines: BTreeSet<(Instant, u64)>,
    next: u64,
    spawned: reply::Groups,
    killed: reply::Groups,
    /// The seq of the shutdown request being carried out.
    closing: Option<u64>,
    pub(crate) started: u64,
    pub(crate) failed: u64,
    pub(crate) ended: u64,
}

impl Server {
    pub fn new(engine: Arc<Engine>, socket: &str, instance: &str) -> Result<Self> {
        // SAFETY: plain system call.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(Error::last("epoll_create", ""));
        }
        let pool = Pool::start(&engine)?;
        let server = Self {
            pool,
            // SAFETY: just made.
            epoll: unsafe { OwnedFd::from_raw_fd(fd) },
            listener: packet::listen(socket)?,
            engine,
            instance: instance.to_owned(),
            entries: HashMap::new(),
            ids: HashMap::new(),
            controller: None,
            queue: VecDeque::new(),
            deadlines: BTreeSet::new(),
            next: FIRST_SANDBOX,
            spawned: reply::Groups::default(),
            killed: reply::Groups::default(),
            closing: None,
            started: 0,
            failed: 0,
            ended: 0,
        };
        server.watch(server.listener.as_raw_fd(), LISTENER, libc::EPOLLIN)?;
        server.watch(server.pool.wake.as_raw_fd(), RESULTS, libc::EPOLLIN)?;
        Ok(server)
    }

    /// Serves until a shutdown request.
    pub fn run(mut self) -> Result<()> {
        loop {
            self.expire();
            let timeout = match self.deadlines.first() {
                Some((at, _)) => {
                    at.saturating_duration_since(Instant::now()).as_millis() as i32 + 1
                }
                None => -1,
            };
            let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
            // SAFETY: `events` has room for the number passed.
            let n = unsafe {
                libc::epoll_wait(self.epoll.as_raw_fd(), events.as_mut_ptr(), 64, timeout)
            };
            for event in &events[..n.max(0) as usize] {
                let (token, flags) = (event.u64, event.events);
                self.event(token, flags);
            }
            self.flush();
            if self.closing.is_some()
                && self
                    .entries
                    .values()
                    .all(|e| matches!(e.phase, Phase::Running))
            {
                return self.finish();
            }
        }
    }

    fn finish(mut self) -> Result<()> {
        self.engine.close();
        if let Some(seq) = self.closing {
            self.answer(seq, "ok", vec![]);
        }
        Ok(())
    }

    fn watch(&self, fd: RawFd, token: u64, flags: i32) -> Result<()> {
        let mut event = libc::epoll_event {
            events: flags as u32,
            u64: token,
        };
        // SAFETY: `event` is valid for reading.
        match unsafe {
            libc::epoll_ctl(self.epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &mut event)
        } {
            0 => Ok(()),
            _ => Err(Error::last("epoll_ctl", "add")),
        }
    }

    /// Explicit, since a copy of the descriptor that the controller holds would keep the registration alive.
    fn unwatch(&self, fd: RawFd) {
        // SAFETY: a null event is allowed for deletion.
        unsafe {
            libc::epoll_ctl(
                self.epoll.as_raw_fd(),
                libc::EPOLL_CTL_DEL,
                fd,
                std::ptr::null_mut(),
            )
        };
    }

    fn event(&mut self, token: u64, flags: u32) {
        match token {
            LISTENER => self.accept(),
            CONTROLLER => self.controller_event(flags),
            RESULTS => {
                for (token, done) in self.pool.results() {
                    match done {
                        Done::Started(result) => self.on_started(token, result),
                        Done::Ended(result) => self.on_ended(token, result),
                    }
                }
            }
            _ if token % 2 == 0 => self.on_exit(token / 2),
            _ => self.on_packet(token / 2),
        }
    }

    fn accept(&mut self) {
        while let Some(socket) = packet::accept(self.listener.as_fd()) {
            self.drop_controller();
            if self
                .watch(socket.as_raw_fd(), CONTROLLER, libc::EPOLLIN)
                .is_ok()
            {
                self.controller = Some(socket);
            }
        }
    }

    fn drop_controller(&mut self) {
        if let Some(old) = self.controller.take() {
            self.unwatch(old.as_raw_fd());
        }
        self.queue.clear();
        self.spawned.clear();
        self.killed.clear();
        self.abandon();
    }

    /// Ends what the lost controller was still waiting for: no answer reaches it, and `list` shows the next one only what runs.
    /// The numbers of its requests are forgotten, since the next one counts anew.
    fn abandon(&mut self) {
        let mut starting = Vec::new();
        for (token, entry) in &mut self.entries {
            entry.kills.clear();
            entry.spawn = None;
            match entry.phase {
                Phase::Queued => entry.unwanted = true,
                Phase::Starting(_) => starting.push(*token),
                Phase::Running | Phase::Ending => {}
            }
        }
        for token in starting {
            self.end(token, None);
        }
    }

    fn controller_event(&mut self, flags: u32) {
        if flags & libc::EPOLLOUT as u32 != 0 {
            self.drain_queue();
        }
        let mut buf = vec![0u8; packet::MAX_MESSAGE];
        // A bounded number of packets a turn, so that a flood starves nobody.
        for _ in 0..16 {
            let Some(socket) = &self.controller else {
                return;
            };
            match packet::receive(socket.as_fd(), &mut buf) {
                Received::Packet(data, fds) => self.request(&data, fds),
                Received::TooLong => {
                    let error = Error::Invalid(
                        "the message is longer than 128 KiB or has too many descriptors".into(),
                    );
                    self.error(0, &error);
                }
                Received::Nothing => return,
                Received::Closed => return self.drop_controller(),
            }
        }
    }

    // ---- sending ----

    pub(crate) fn send(&mut self, packet: Vec<u8>, fds: &[RawFd]) {
        let Some(socket) = &self.controller else {
            return;
        };
        if self.queue.is_empty() {
            match packet::send(socket.as_fd(), &packet, fds) {
                Ok(true) => return,
                Ok(false) => self.want_output(true),
                Err(_) => return self.drop_controller(),
            }
        }
        // SAFETY: the numbers are open: they belong to sandboxes in our table.
        let copies = fds
            .iter()
            .map(|fd| sys::dup(unsafe { std::os::fd::BorrowedFd::borrow_raw(*fd) }));
        match copies.collect::<Result<Vec<_>>>() {
            Ok(fds) if self.queue.len() < MAX_QUEUE => {
                self.queue.push_back(Waiting { packet, fds })
            }
            _ => self.drop_controller(),
        }
    }

    fn want_output(&self, on: bool) {
        let Some(socket) = &self.controller else {
            return;
        };
        let flags = libc::EPOLLIN | if on { libc::EPOLLOUT } else { 0 };
        let mut event = libc::epoll_event {
            events: flags as u32,
            u64: CONTROLLER,
        };
        // SAFETY: `event` is valid for reading.
        unsafe {
            libc::epoll_ctl(
                self.epoll.as_raw_fd(),
                libc::EPOLL_CTL_MOD,
                socket.as_raw_fd(),
                &mut event,
            )
        };
    }

    fn drain_queue(&mut self) {
        while let (Some(first), Some(socket)) = (self.queue.front(), &self.controller) {
            let fds: Vec<RawFd> = first.fds.iter().map(AsRawFd::as_raw_fd).collect();
            match packet::send(socket.as_fd(), &first.packet, &fds) {
                Ok(true) => drop(self.queue.pop_front()),
                Ok(false) => return,
                Err(_) => return self.drop_controller(),
            }
        }
        self.want_output(false);
    }

    pub(crate) fn answer(&mut self, seq: u64, kind: &str, mut fields: Vec<(&str, Value)>) {
        fields.splice(0..0, [("t", Value::from(kind)), ("seq", seq.into())]);
        self.send(encode(fields), &[]);
    }

    pub(crate) fn error(&mut self, seq: u64, error: &Error) {
        self.answer(seq, "error", reply::error_fields(error));
    }

    /// Sends the results that came together in this turn, grouped by request.
    fn flush(&mut self) {
        for (seq, results, tokens) in self.spawned.take() {
            let fds: Vec<RawFd> = tokens
                .iter()
                .flat_map(|token| self.descriptors(*token))
                .collect();
            let fields = vec![
                ("t", Value::from("spawned")),
                ("seq", seq.into()),
                ("results", Value::Array(results)),
            ];
            self.send(encode(fields), &fds);
        }
        for (seq, results, _) in self.killed.take() {
            self.answer(seq, "killed", vec![("results", Value::Array(results))]);
        }
    }

    /// The pidfd and the channel of a sandbox; /dev/null stands for a channel that was not asked for.
    pub(crate) fn descriptors(&self, token: u64) -> Vec<RawFd> {
        let Some(sandbox) = self.entries.get(&token).and_then(|e| e.sandbox.as_ref()) else {
            return vec![self.engine.host.null.as_raw_fd(); 2];
        };
        let channel = sandbox.channel.as_ref().unwrap_or(&self.engine.host.null);
        vec![sandbox.pidfd.as_raw_fd(), channel.as_raw_fd()]
    }

    // ---- the life of a sandbox ----

    pub(crate) fn spawn(
        &mut self,
        seq: u64,
        index: u64,
        spec: Result<crate::spec::Spec>,
        id: &str,
    ) {
        let spec = match spec {
            Ok(spec) if self.ids.contains_key(&spec.id) => {
                Err(Error::Exists(format!("sandbox {} exists", spec.id)))
            }
            Ok(_) if self.closing.is_some() => {
                Err(Error::Busy("the launcher is shutting down".into()))
            }
            other => other,
        };
        let spec = match spec {
            Ok(spec) => spec,
            Err(error) => return self.spawn_failed(seq, index, id, &error),
        };
        let token = self.next;
        self.next += 1;
        self.ids.insert(spec.id.clone(), token);
        let entry = Entry {
            id: spec.id.clone(),
            tag: spec.tag.clone(),
            phase: Phase::Queued,
            sandbox: None,
            ready_ms: spec.ready_ms,
            spawn: Some((seq, index)),
            failure: None,
            kills: Vec::new(),
            unwanted: false,
        };
        self.entries.insert(token, entry);
        self.pool.submit(token, Job::Start(Box::new(spec)));
    }

    fn spawn_failed(&mut self, seq: u64, index: u64, id: &str, error: &Error) {
        self.failed += 1;
        self.spawned
            .add(seq, reply::spawn_error(index, id, error), None);
    }

    fn on_started(&mut self, token: u64, result: Result<Box<Sandbox>>) {
        let Some(entry) = self.entries.get_mut(&token) else {
            return;
        };
        let sandbox = match result {
            Ok(sandbox) => sandbox,
            Err(error) => return self.forget_failed(token, &error),
        };
        let (pidfd, channel) = (
            sandbox.pidfd.as_raw_fd(),
            sandbox.channel.as_ref().map(AsRawFd::as_raw_fd),
        );
        entry.sandbox = Some(sandbox);
        let ready_ms = entry.ready_ms;
        if entry.unwanted || !entry.kills.is_empty() {
            return self.end(
                token,
                Some(Error::NotFound("killed before it was ready".into())),
            );
        }
        let wait = channel.filter(|_| ready_ms > 0);
        let deadline = Instant::now() + Duration::from_millis(ready_ms);
        entry.phase = if wait.is_some() {
            Phase::Starting(deadline)
        } else {
            Phase::Running
        };
        let mut watched = self.watch(pidfd, token * 2, libc::EPOLLIN);
        match wait {
            Some(channel) => {
                self.deadlines.insert((deadline, token));
                watched = watched.and_then(|()| self.watch(channel, token * 2 + 1, libc::EPOLLIN));
            }
            None => self.spawn_done(token, Vec::new()),
        }
        if let Err(error) = watched {
            self.end(token, Some(error));
        }
    }

    /// A spawn that failed with nothing left of it.
    fn forget_failed(&mut self, token: u64, error: &Error) {
        let Some(entry) = self.entries.remove(&token) else {
            return;
        };
        self.ids.remove(&entry.id);
        if let Some((seq, index)) = entry.spawn {
            self.spawn_failed(seq, index, &entry.id, error);
        }
        for seq in entry.kills {
            self.killed.add(
                seq,
                reply::kill_error(&entry.id, &Error::NotFound("it did not start".into())),
                None,
            );
        }
    }

    fn spawn_done(&mut self, token: u64, hello: Vec<u8>) {
        let Some(entry) = self.entries.get_mut(&token) else {
            return;
        };
        entry.phase = Phase::Running;
        self.started += 1;
        let (Some((seq, index)), Some(sandbox)) = (entry.spawn.take(), &entry.sandbox) else {
            return;
        };
        self.spawned.add(
            seq,
            reply::spawn_result(index, &entry.id, sandbox, hello),
            Some(token),
        );
    }

    /// The first packet of a program, or the end of its channel.
    fn on_packet(&mut self, token: u64) {
        let Some(entry) = self.entries.get_mut(&token) else {
            return;
        };
        let (Phase::Starting(deadline), Some(sandbox)) = (&entry.phase, &entry.sandbox) else {
            return;
        };
        let Some(channel) = &sandbox.channel else {
            return;
        };
        let mut buf = vec![0u8; 65_600];
        let received = packet::receive(channel.as_fd(), &mut buf);
        let (deadline, number) = (*deadline, channel.as_raw_fd());
        match received {
            Received::Nothing => {}
            Received::Packet(hello, _) => {
                self.unwatch(number);
                self.deadlines.remove(&(deadline, token));
                self.spawn_done(token, hello);
            }
            Received::TooLong => self.end(
                token,
                Some(Error::Invalid(
                    "the program's first packet is too long".into(),
                )),
            ),
            Received::Closed => self.end(token, Some(Error::Ended(None))),
        }
    }

    /// The first process ended by itself.
    fn on_exit(&mut self, token: u64) {
        let Some(entry) = self.entries.get(&token) else {
            return;
        };
        match entry.phase {
            Phase::Running => self.end(token, None),
            Phase::Starting(_) => self.end(token, Some(Error::Ended(None))),
            _ => {}
        }
    }

    /// Hands a sandbox to a worker for its end. With `failure`, the spawn request is answered by it afterwards.
    pub(crate) fn end(&mut self, token: u64, failure: Option<Error>) {
        let Some(entry) = self.entries.get_mut(&token) else {
            return;
        };
        let Some(sandbox) = entry.sandbox.take() else {
            return;
        };
        if let Phase::Starting(deadline) = entry.phase {
            self.deadlines.remove(&(deadline, token));
        }
        entry.phase = Phase::Ending;
        entry.failure = failure;
        sys::pidfd_kill(sandbox.pidfd.as_fd());
        self.unwatch(sandbox.pidfd.as_raw_fd());
        if let Some(channel) = &sandbox.channel {
            self.unwatch(channel.as_raw_fd());
        }
        self.pool.submit(token, Job::End(sandbox));
    }

    fn on_ended(&mut self, token: u64, result: Result<Ending>) {
        let Some(entry) = self.entries.remove(&token) else {
            return;
        };
        self.ids.remove(&entry.id);
        self.ended += 1;
        if let Err(error) = &result {
            eprintln!("dsec-launch: the end of {}: {error}", entry.id);
        }
        if let Some((seq, index)) = entry.spawn {
            let error = match (entry.failure, &result) {
                (Some(Error::Ended(_)), Ok(ending)) => Error::Ended(ending.status),
                (Some(error), _) => error,
                (None, _) => Error::NotFound("killed before it was ready".into()),
            };
            self.spawn_failed(seq, index, &entry.id, &error);
        } else if entry.kills.is_empty() && self.closing.is_none() {
            let ending = result.unwrap_or(Ending {
                status: None,
                oom_kills: 0,
            });
            let mut fields = vec![
                ("t", Value::from("exited")),
                ("id", entry.id.as_str().into()),
            ];
            fields.extend(reply::ending(ending));
            self.send(encode(fields), &[]);
            return;
        }
        for seq in entry.kills {
            let value = match &result {
                Ok(ending) => {
                    let mut fields = vec![("id", Value::from(entry.id.as_str()))];
                    fields.extend(reply::ending(*ending));
                    map(fields)
                }
                Err(error) => reply::kill_error(&entry.id, error),
            };
            self.killed.add(seq, value, None);
        }
    }

    pub(crate) fn kill(&mut self, seq: u64, id: &str) {
        let Some(token) = self.ids.get(id).copied() else {
            return self.killed.add(
                seq,
                reply::kill_error(id, &Error::NotFound(format!("no sandbox {id}"))),
                None,
            );
        };
        if let Some(entry) = self.entries.get_mut(&token) {
            entry.kills.push(seq);
            match entry.phase {
                Phase::Queued | Phase::Ending => {}
                Phase::Starting(_) => self.end(
                    token,
                    Some(Error::NotFound("killed before it was ready".into())),
                ),
                Phase::Running => self.end(token, None),
            }
        }
    }

    pub(crate) fn adopt(&mut self, id: String, tag: Vec<u8>, sandbox: Sandbox) -> Result<()> {
        if self.ids.contains_key(&id) {
            return Err(Error::Exists(format!("sandbox {id} exists")));
        }
        let token = self.next;
        self.next += 1;
        self.watch(sandbox.pidfd.as_raw_fd(), token * 2, libc::EPOLLIN)?;
        self.ids.insert(id.clone(), token);
        let sandbox = Some(Box::new(sandbox));
        let entry = Entry {
            id,
            tag,
            phase: Phase::Running,
            sandbox,
            ready_ms: 0,
            spawn: None,
            failure: None,
            kills: vec![],
            unwanted: false,
        };
        self.entries.insert(token, entry);
        Ok(())
    }

    pub(crate) fn shutdown(&mut self, seq: u64, kill: bool) {
        self.closing = Some(seq);
        if kill {
            for token in self.entries.keys().copied().collect::<Vec<_>>() {
                if let Some(entry) = self.entries.get_mut(&token) {
                    match entry.phase {
                        Phase::Queued => entry.kills.push(seq),
                        _ => self.end(token, None),
                    }
                }
            }
        }
    }

    fn expire(&mut self) {
        let now = Instant::now();
        while let Some((at, token)) = self.deadlines.first().copied().filter(|(at, _)| *at <= now) {
            self.deadlines.remove(&(at, token));
            let ready_ms = self.entries.get(&token).map_or(0, |e| e.ready_ms);
            self.end(token, Some(Error::Timeout(ready_ms)));
        }
    }
}
