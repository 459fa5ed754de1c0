//! Drives the real guest binary over a SEQPACKET pair.
#![allow(dead_code)]

use dsec_guest::sys::{io, task, Fd};
use dsec_wire::frame::{self, Frames};
use dsec_wire::{Encoder, Value};
use std::collections::HashMap;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Every wait in the tests ends after so long.
const LIMIT: Duration = Duration::from_secs(30);

/// A frame with its payload owned.
#[derive(Debug, Clone)]
pub struct Got {
    pub stream: u32,
    pub kind: u8,
    pub fin: bool,
    pub payload: Vec<u8>,
}

pub struct Guest {
    pub child: Child,
    channel: Fd,
    next: u32,
    queue: HashMap<u32, Vec<Got>>,
    pub hello: Vec<u8>,
    pub hello_us: u64,
    /// Descriptors the guest was given, kept open.
    _fds: Vec<Fd>,
}

/// Everything an exec answered.
#[derive(Debug, Default)]
pub struct Done {
    pub out: Vec<u8>,
    pub err: Vec<u8>,
    pub exit: Option<i64>,
    pub signal: Option<i64>,
    pub reason: String,
    pub error: Option<String>,
    pub raw: Vec<u8>,
}

impl Guest {
    pub fn start() -> Guest {
        Guest::start_with(Vec::new(), &[], |_| {})
    }

    /// Starts the guest with more named descriptors, and a hook on the command.
    pub fn start_with(
        fds: Vec<(&str, Fd)>,
        config: &[(&str, Value<'_>)],
        hook: impl FnOnce(&mut Command),
    ) -> Guest {
        let (ours, theirs) = io::seqpacket_pair().unwrap();
        let mut hello = Encoder::new();
        let config = Value::Map(
            config
                .iter()
                .map(|(k, v)| (Value::Str(k), v.clone()))
                .collect(),
        );
        hello
            .map(3)
            .str("proto")
            .uint(1)
            .str("epoch")
            .uint(1)
            .str("config")
            .value(&config);
        let mut packet = Vec::new();
        frame::put(&mut packet, 0, frame::HELLO, &hello.out);
        io::send(ours.raw(), &packet, true).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_dsec-guest"));
        command.arg("channel=200").stdin(Stdio::null());
        let mut moves = vec![(theirs.raw(), 200)];
        for (i, (name, fd)) in fds.iter().enumerate() {
            command.arg(format!("{name}={}", 201 + i));
            moves.push((fd.raw(), 201 + i as i32));
        }
        // SAFETY: only system calls between fork and exec.
        unsafe {
            command.pre_exec(move || {
                moves
                    .iter()
                    .try_for_each(|(from, to)| io::dup_to(*from, *to))
                    .map_err(|e| std::io::Error::from_raw_os_error(e.0))
            });
        }
        hook(&mut command);
        let before = Instant::now();
        let child = command.spawn().unwrap();
        drop(theirs);
        let kept = fds.into_iter().map(|(_, fd)| fd).collect();
        let mut guest = Guest {
            child,
            channel: ours,
            next: 1,
            queue: HashMap::new(),
            hello: Vec::new(),
            hello_us: 0,
            _fds: kept,
        };
        let hello = guest.next_frame(0);
        assert_eq!(hello.kind, frame::HELLO);
        guest.hello_us = before.elapsed().as_micros() as u64;
        guest.hello = hello.payload;
        guest
    }

    pub fn raw_send(&self, packet: &[u8]) {
        io::send(self.channel.raw(), packet, true).unwrap();
    }

    pub fn send(&self, stream: u32, kind: u8, payload: &[u8]) {
        let mut packet = Vec::new();
        frame::put(&mut packet, stream, kind, payload);
        self.raw_send(&packet);
    }

    /// Opens a stream for `request`, a list of keys and values.
    pub fn open(&mut self, request: &[(&str, Value<'_>)], fin: bool) -> u32 {
        let id = self.next;
        self.next += 2;
        let mut e = Encoder::new();
        e.value(&Value::Map(
            request
                .iter()
                .map(|(k, v)| (Value::Str(k), v.clone()))
                .collect(),
        ));
        self.send(id, frame::OPEN | if fin { frame::FIN } else { 0 }, &e.out);
        id
    }

    /// The next frame of a stream; frames of others are kept for them.
    pub fn next_frame(&mut self, stream: u32) -> Got {
        self.frame_within(stream, LIMIT)
            .expect("the guest did not answer in time")
    }

    pub fn frame_within(&mut self, stream: u32, limit: Duration) -> Option<Got> {
        let until = Instant::now() + limit;
        loop {
            if let Some(list) = self.queue.get_mut(&stream) {
                if !list.is_empty() {
                    return Some(list.remove(0));
                }
            }
            let left = until.checked_duration_since(Instant::now())?;
            self.receive(left);
        }
    }

    fn receive(&mut self, limit: Duration) {
        let mut buf = vec![0; frame::MAX_PACKET];
        let until = Instant::now() + limit;
        let n = loop {
            match io::recv(self.channel.raw(), &mut buf, false) {
                Ok(n) => break n,
                Err(_) if Instant::now() > until => return,
                Err(_) => wait_readable(
                    self.channel.raw(),
                    until.saturating_duration_since(Instant::now()),
                ),
            }
        };
        assert!(n > 0, "the guest closed the channel");
        for frame in Frames::new(&buf[..n]) {
            let f = frame.expect("a broken frame from the guest");
            let got = Got {
                stream: f.stream,
                kind: f.kind,
                fin: f.fin,
                payload: f.payload.to_vec(),
            };
            self.queue.entry(f.stream).or_default().push(got);
        }
    }

    /// Collects an exec's answer, granting credit for all DATA.
    pub fn collect(&mut self, stream: u32) -> Done {
        let mut done = Done::default();
        loop {
            let got = self.next_frame(stream);
            match got.kind {
                frame::DATA => {
                    self.send(
                        stream,
                        frame::CREDIT,
                        &(got.payload.len() as u32).to_le_bytes(),
                    );
                    let to = if got.payload[0] == 1 {
                        &mut done.out
                    } else {
                        &mut done.err
                    };
                    to.extend_from_slice(&got.payload[9..]);
                }
                frame::MSG if got.fin => {
                    let map = Value::decode(&got.payload).unwrap();
                    if let Some(out) = map.get("out").and_then(Value::as_bytes) {
                        done.out.extend_from_slice(out);
                        done.err
                            .extend_from_slice(map.get("err").and_then(Value::as_bytes).unwrap());
                    }
                    done.exit = map.get("exit").and_then(Value::as_i64);
                    done.signal = map.get("signal").and_then(Value::as_i64);
                    done.reason = map
                        .get("reason")
                        .and_then(Value::as_str)
                        .unwrap_or("")
                        .into();
                    drop(map);
                    done.raw = got.payload;
                    return done;
                }
                frame::RESET => {
                    let map = Value::decode(&got.payload).unwrap();
                    done.error = map.get("code").and_then(Value::as_str).map(String::from);
                    drop(map);
                    done.raw = got.payload;
                    return done;
                }
                _ => {}
            }
        }
    }

    pub fn exec(&mut self, request: &[(&str, Value<'_>)]) -> Done {
        let id = format!("p{}", self.next);
        let mut all = vec![("m", Value::Str("exec")), ("id", Value::Str(&id))];
        all.extend(request.iter().map(|(k, v)| (*k, v.clone())));
        let stream = self.open(&all, false);
        self.collect(stream)
    }

    /// Opens an exec of a shell text without waiting for it.
    pub fn open_shell(&mut self, text: &str) -> u32 {
        let id = format!("p{}", self.next);
        self.open(
            &[
                ("m", Value::Str("exec")),
                ("id", Value::Str(&id)),
                ("shell", Value::Bin(text.as_bytes())),
            ],
            true,
        )
    }

    pub fn shell(&mut self, text: &str) -> Done {
        self.exec(&[("shell", Value::Bin(text.as_bytes()))])
    }

    pub fn status_kib(&self, key: &str) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = text.lines().find(|l| l.starts_with(key)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = task::kill(self.child.id() as i32, 9);
        let _ = self.child.wait();
    }
}

/// argv as a value.
pub fn words<'a>(list: &[&'a str]) -> Value<'a> {
    Value::Array(list.iter().map(|w| Value::Bin(w.as_bytes())).collect())
}

fn wait_readable(fd: i32, limit: Duration) {
    use dsec_guest::sys::event::{Epoll, Event};
    let epoll = Epoll::new().unwrap();
    epoll.add(fd, 1, 0).unwrap();
    epoll.wait(
        &mut [Event::default()],
        limit.as_millis().min(60_000) as i32 + 1,
    );
}

/// Waits for a condition, at most the limit.
pub fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < until, "{what} did not happen in time");
        std::thread::sleep(Duration::from_millis(5));
    }
}
