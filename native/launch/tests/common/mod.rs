//! A launcher of its own for each test, with a client, a small root file system and a probe to run in it.
#![allow(dead_code)]

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use dsec_launch::msg::{self, map, Map};
use dsec_launch::packet::{self, Received};
use dsec_launch::sys;
pub use rmpv::Value;

pub const WAIT: Duration = Duration::from_secs(20);

/// Built once: the probe and the layer.
pub struct Fixture {
    pub probe: PathBuf,
    pub layer: PathBuf,
    pub dir: PathBuf,
}

fn must(command: &mut Command) {
    let output = command
        .output()
        .unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

pub fn fixture() -> &'static Fixture {
    static FIXTURE: OnceLock<Fixture> = OnceLock::new();
    FIXTURE.get_or_init(|| {
        // SAFETY: plain system call.
        assert_eq!(unsafe { libc::geteuid() }, 0, "these tests need root");
        let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("launch-{}", std::process::id()));
        let root = dir.join("root");
        for name in ["bin", "proc", "dev", "sys/firmware", "etc", "tmp", "root"] {
            std::fs::create_dir_all(root.join(name)).expect("mkdir");
        }
        std::fs::write(root.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n").expect("passwd");
        std::fs::copy("/bin/busybox", root.join("bin/busybox")).expect("busybox-static is needed");
        for name in [
            "sh", "cat", "ls", "id", "mount", "hostname", "stat", "sleep", "dd", "mkdir", "chown",
            "touch", "nproc",
        ] {
            std::os::unix::fs::symlink("busybox", root.join("bin").join(name)).expect("symlink");
        }
        let (probe, layer) = (dir.join("probe"), dir.join("base.erofs"));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/common/probe.c");
        must(
            Command::new("gcc")
                .args(["-O1", "-static", "-Wall", "-o"])
                .arg(&probe)
                .arg(source),
        );
        must(Command::new("mkfs.erofs").arg(&layer).arg(&root));
        Fixture { probe, layer, dir }
    })
}

/// Tests count what is on the host, so they take turns.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

pub struct Launcher {
    pub process: Child,
    pub name: String,
    pub uid_base: u32,
    socket_path: PathBuf,
    socket: OwnedFd,
    seq: u64,
    events: Vec<(Map, Vec<OwnedFd>)>,
}

/// A started sandbox as its controller sees it.
pub struct Running {
    pub id: String,
    pub pid: i32,
    pub slot: u32,
    pub hello: String,
    pub pidfd: OwnedFd,
    pub channel: OwnedFd,
}

impl Running {
    /// Sends the probe a request and gives its answer.
    pub fn ask(&self, text: &str) -> String {
        assert!(packet::send(self.channel.as_fd(), text.as_bytes(), &[]).expect("send"));
        assert!(
            sys::poll_in(self.channel.as_fd(), Some(WAIT)),
            "no answer to {text}"
        );
        match packet::receive(self.channel.as_fd(), &mut vec![0; 65_536]) {
            Received::Packet(data, _) => String::from_utf8_lossy(&data).into_owned(),
            _ => panic!("the probe is gone after {text}"),
        }
    }

    /// Output of a shell command as the sandbox's root; it must succeed.
    pub fn sh(&self, command: &str) -> String {
        let answer = self.ask(&format!("s{command}"));
        answer
            .strip_suffix("[0]")
            .unwrap_or_else(|| panic!("{command}: {answer}"))
            .trim()
            .to_owned()
    }
}

static NEXT: AtomicU32 = AtomicU32::new(0);

impl Launcher {
    pub fn start() -> Self {
        let name = format!(
            "dsectest-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        Self::start_named(&name)
    }

    pub fn start_named(name: &str) -> Self {
        let socket_path = fixture().dir.join(format!("{name}.sock"));
        // A block of its own for each test process would need a registry; tests take turns instead.
        let uid_base = 1_600_000_000;
        let mut command = Command::new(env!("CARGO_BIN_EXE_dsec-launch"));
        command.args([
            "serve",
            "--instance",
            "test",
            "--cgroup-name",
            name,
            "--uid-base",
            &uid_base.to_string(),
        ]);
        let _ = std::fs::remove_file(&socket_path);
        let process = command
            .arg("--socket")
            .arg(&socket_path)
            .stdin(Stdio::null())
            .spawn()
            .expect("launcher");
        let mut launcher = Self {
            process,
            name: name.to_owned(),
            uid_base,
            socket: connect(&socket_path),
            socket_path,
            seq: 0,
            events: Vec::new(),
        };
        let path = fixture().layer.to_str().expect("utf-8").to_owned();
        launcher.ok(
            "layer",
            vec![("name", "base".into()), ("path", path.into())],
        );
        launcher
    }

    pub fn reconnect(&mut self) {
        self.socket = connect(&self.socket_path);
    }

    pub fn send(&mut self, kind: &str, mut fields: Vec<(&str, Value)>, fds: &[RawFd]) -> u64 {
        self.seq += 1;
        fields.extend([("t", kind.into()), ("seq", self.seq.into())]);
        assert!(packet::send(self.socket.as_fd(), &msg::encode(fields), fds).expect("send"));
        self.seq
    }

    pub fn send_raw(&mut self, data: &[u8]) {
        assert!(packet::send(self.socket.as_fd(), data, &[]).expect("send"));
    }

    fn read(&mut self) -> (Map, Vec<OwnedFd>) {
        assert!(
            sys::poll_in(self.socket.as_fd(), Some(WAIT)),
            "the launcher does not answer"
        );
        match packet::receive(self.socket.as_fd(), &mut vec![0; packet::MAX_MESSAGE]) {
            Received::Packet(data, fds) => (msg::decode(&data).expect("msgpack"), fds),
            _ => panic!("the launcher closed the connection"),
        }
    }

    /// The next message that fits; others are kept.
    pub fn next(&mut self, wanted: impl Fn(&Map) -> bool) -> (Map, Vec<OwnedFd>) {
        if let Some(at) = self.events.iter().position(|(m, _)| wanted(m)) {
            return self.events.remove(at);
        }
        loop {
            let message = self.read();
            if wanted(&message.0) {
                return message;
            }
            self.events.push(message);
        }
    }

    pub fn answer(&mut self, seq: u64) -> (Map, Vec<OwnedFd>) {
        self.next(|m| m.uint("seq").ok().flatten() == Some(seq))
    }

    pub fn ask(&mut self, kind: &str, fields: Vec<(&str, Value)>) -> Map {
        let seq = self.send(kind, fields, &[]);
        self.answer(seq).0
    }

    pub fn ok(&mut self, kind: &str, fields: Vec<(&str, Value)>) {
        let answer = self.ask(kind, fields);
        assert_eq!(
            answer.text("t").expect("t").as_deref(),
            Some("ok"),
            "{answer:?}"
        );
    }

    /// Starts sandboxes; results by id.
    pub fn spawn(
        &mut self,
        common: Value,
        items: Vec<Value>,
    ) -> HashMap<String, Result<Running, (String, String)>> {
        let count = items.len();
        let seq = self.send(
            "spawn",
            vec![("common", common), ("items", Value::Array(items))],
            &[],
        );
        let mut results = HashMap::new();
        while results.len() < count {
            let (answer, fds) = self.answer(seq);
            assert_eq!(
                answer.text("t").expect("t").as_deref(),
                Some("spawned"),
                "{answer:?}"
            );
            let mut fds = fds.into_iter();
            for row in answer.maps("results").expect("results") {
                let id = row.need_text("id").expect("id");
                let result = match row.sub("error").expect("error") {
                    Some(e) => Err((
                        e.need_text("code").expect("code"),
                        e.need_text("msg").expect("msg"),
                    )),
                    None => Ok(Running {
                        id: id.clone(),
                        pid: row.uint32("pid").expect("pid").expect("pid") as i32,
                        slot: row.uint32("slot").expect("slot").expect("slot"),
                        hello: String::from_utf8_lossy(
                            &row.bytes("hello").expect("hello").unwrap_or_default(),
                        )
                        .into(),
                        pidfd: fds.next().expect("a pidfd"),
                        channel: fds.next().expect("a channel"),
                    }),
                };
                results.insert(id, result);
            }
        }
        results
    }

    pub fn spawn_one(&mut self, fields: Vec<(&str, Value)>) -> Result<Running, (String, String)> {
        let item = map(fields);
        self.spawn(container(), vec![item])
            .into_values()
            .next()
            .expect("one result")
    }

    pub fn run(&mut self, id: &str) -> Running {
        self.spawn_one(vec![("id", id.into())])
            .unwrap_or_else(|e| panic!("{id}: {e:?}"))
    }

    /// Ends sandboxes; rows by id.
    pub fn kill(&mut self, ids: &[&str]) -> HashMap<String, Map> {
        let list = Value::Array(ids.iter().map(|id| Value::from(*id)).collect());
        let seq = self.send("kill", vec![("ids", list), ("destroy", true.into())], &[]);
        let mut rows = HashMap::new();
        while rows.len() < ids.len() {
            for row in self.answer(seq).0.maps("results").expect("results") {
                rows.insert(row.need_text("id").expect("id"), row);
            }
        }
        rows
    }

    pub fn stat(&mut self, name: &str) -> u64 {
        self.ask("stats", vec![])
            .uint(name)
            .expect("uint")
            .unwrap_or_else(|| panic!("no {name}"))
    }

    /// Open descriptors without those of prepared slots (five each).
    pub fn fds_in_use(&mut self) -> i64 {
        self.settle();
        self.fd_count() as i64 - 5 * self.stat("prepared") as i64
    }

    pub fn fd_count(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.process.id()))
            .expect("fd")
            .count()
    }

    /// Waits until the pools are as full as they get, so that counts are comparable.
    pub fn settle(&mut self) {
        let end = Instant::now() + WAIT;
        let mut last = (0, 0);
        let mut same = 0;
        while same < 5 {
            assert!(
                Instant::now() < end,
                "the launcher does not come to rest: {last:?}"
            );
            let now = (self.stat("prepared"), self.fd_count());
            same = if now == last { same + 1 } else { 0 };
            last = now;
            std::thread::sleep(Duration::from_millis(30));
        }
    }

    /// Ends the launcher with all sandboxes and checks that its cgroups are gone.
    pub fn finish(mut self) {
        self.ok("shutdown", vec![("kill", true.into())]);
        assert!(self.process.wait().expect("wait").success());
        assert_eq!(cgroups(&self.name), Vec::<PathBuf>::new());
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        // After a failed test: ends what is left, so that the next test starts clean.
        let _ = self.process.kill();
        let _ = self.process.wait();
        for path in cgroups(&self.name) {
            let _ = std::fs::write(path.join("cgroup.kill"), "1");
            remove_cgroup(&path);
        }
    }
}

fn remove_cgroup(path: &Path) {
    let end = Instant::now() + Duration::from_secs(2);
    while path.exists() && Instant::now() < end {
        for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                remove_cgroup(&entry.path());
            }
        }
        if std::fs::remove_dir(path).is_err() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// The directories of an instance that exist.
pub fn cgroups(name: &str) -> Vec<PathBuf> {
    let bases = ["unified", "memory", "cpu", "pids", "."];
    let paths = bases
        .iter()
        .map(|base| Path::new("/sys/fs/cgroup").join(base).join(name));
    paths.filter(|path| path.exists()).collect()
}

fn connect(path: &Path) -> OwnedFd {
    let end = Instant::now() + WAIT;
    loop {
        // SAFETY: plain socket call.
        let fd =
            unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) };
        // SAFETY: just made.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: sockaddr_un is plain data, for which zero is a value.
        let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
        address.sun_family = libc::AF_UNIX as u16;
        for (to, from) in address
            .sun_path
            .iter_mut()
            .zip(path.to_str().expect("utf-8").bytes())
        {
            *to = from as libc::c_char;
        }
        // SAFETY: the address is valid for its size.
        let done = unsafe {
            libc::connect(
                socket.as_raw_fd(),
                (&raw const address).cast(),
                size_of_val(&address) as u32,
            )
        };
        if done == 0 {
            return socket;
        }
        assert!(Instant::now() < end, "the launcher does not listen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn texts(items: &[&str]) -> Value {
    Value::Array(items.iter().map(|i| Value::from(*i)).collect())
}

fn mount(fields: Vec<(&str, Value)>) -> Value {
    map(fields)
}

/// What a failed or ended sandbox could leave on the host.
#[derive(Debug, PartialEq, Eq)]
pub struct Census {
    pub loops: usize,
    pub mounts: usize,
    pub children: usize,
}

impl Census {
    pub fn take(launcher: &Launcher) -> Self {
        let lines = |path: String| {
            std::fs::read_to_string(path)
                .expect("readable")
                .lines()
                .count()
        };
        let pid = launcher.process.id();
        // Of this test only: other programs attach theirs meanwhile.
        let ours = |e: &std::fs::DirEntry| {
            let name =
                std::fs::read_to_string(e.path().join("loop/backing_file")).unwrap_or_default();
            name.starts_with(fixture().dir.to_str().expect("utf-8"))
        };
        let loops = std::fs::read_dir("/sys/block").expect("sysfs").flatten();
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task"))
            .expect("tasks")
            .flatten();
        let children =
            tasks.map(|t| std::fs::read_to_string(t.path().join("children")).unwrap_or_default());
        Self {
            loops: loops.filter(ours).count(),
            mounts: lines("/proc/self/mountinfo".into()),
            children: children.map(|c| c.split_whitespace().count()).sum(),
        }
    }
}

/// A spec with some fields replaced.
pub fn with(fields: Vec<(&str, Value)>) -> Value {
    let Value::Map(mut all) = container() else {
        unreachable!()
    };
    all.extend(fields.into_iter().map(|(k, v)| (Value::from(k), v)));
    Value::Map(all)
}

/// The spec of a full container with the probe as its first process.
pub fn container() -> Value {
    let probe = fixture().probe.to_str().expect("utf-8");
    let mut mounts = vec![
        mount(vec![("kind", "proc".into())]),
        mount(vec![("kind", "dev".into())]),
        mount(vec![("kind", "devpts".into())]),
        mount(vec![
            ("kind", "tmpfs".into()),
            ("path", "/dev/shm".into()),
            ("bytes", 1_048_576.into()),
        ]),
    ];
    for path in [
        "/proc/interrupts",
        "/proc/keys",
        "/proc/timer_list",
        "/proc/absent",
        "/sys/firmware",
    ] {
        mounts.push(mount(vec![("kind", "mask".into()), ("path", path.into())]));
    }
    for path in ["/proc/sys", "/proc/irq", "/proc/bus", "/proc/sysrq-trigger"] {
        mounts.push(mount(vec![("kind", "ro".into()), ("path", path.into())]));
    }
    let argv = [
        "probe",
        "channel=%channel",
        "userns=%userns",
        "runs=%runs",
        "pids=%pids",
        "oom=%oom",
    ];
    map(vec![
        ("project", "p".into()),
        ("exe", probe.into()),
        ("argv", texts(&argv)),
        ("env", texts(&["PATH=/bin"])),
        (
            "ns",
            texts(&["pid", "mnt", "net", "ipc", "uts", "cgroup", "user"]),
        ),
        ("layers", texts(&["base"])),
        (
            "upper",
            map(vec![
                ("kind", "tmpfs".into()),
                ("bytes", (16 << 20).into()),
                ("inodes", 4096.into()),
            ]),
        ),
        ("mounts", Value::Array(mounts)),
        ("hostname", "box".into()),
        ("fds", texts(&["channel", "userns", "runs", "pids", "oom"])),
        (
            "limits",
            map(vec![
                ("memory", (64 << 20).into()),
                ("cpu_quota_us", 100_000.into()),
                ("cpu_period_us", 100_000.into()),
                ("pids", 32.into()),
            ]),
        ),
        ("first", Value::Binary(b"hi".to_vec())),
        ("ready_ms", 10_000.into()),
    ])
}
