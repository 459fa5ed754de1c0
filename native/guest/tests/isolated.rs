//! The guest as it stands in a sandbox: outside the user namespace, with cgroup leaves. Needs root.

mod support;
use dsec_guest::sys::{consts::*, fs as sysfs, task, Fd};
use dsec_wire::{frame, Value};
use std::ffi::CString;
use std::fs;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use support::{wait_for, words, Guest};

/// The guest's host id, which the user namespace does not map.
const AGENT: u32 = 99_999;
const FIRST: u32 = 100_000;

fn open(path: &Path, flags: u32) -> Fd {
    let path = CString::new(path.to_str().unwrap()).unwrap();
    sysfs::openat(AT_FDCWD, &path, flags, 0).unwrap()
}

/// A process that holds a user namespace of the agent's, with ids from `FIRST` on.
struct UserNs(Child);

impl UserNs {
    fn new() -> UserNs {
        let child = Command::new("unshare")
            .args(["-U", "sleep", "1000"])
            .uid(AGENT)
            .gid(AGENT)
            .spawn()
            .unwrap();
        let ns = UserNs(child);
        let own = fs::read_link("/proc/self/ns/user").unwrap();
        wait_for("the new user namespace", || {
            fs::read_link(ns.path("ns/user")).is_ok_and(|link| link != own)
        });
        for map in ["uid_map", "gid_map"] {
            fs::write(ns.path(map), format!("0 {FIRST} 65536")).unwrap();
        }
        ns
    }

    fn path(&self, name: &str) -> PathBuf {
        format!("/proc/{}/{name}", self.0.id()).into()
    }
}

impl Drop for UserNs {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Cgroups as the launcher makes them: cgroup2 NAME/{agent,runs} and v1 pids/NAME.
struct Groups {
    unified: PathBuf,
    pids: Option<PathBuf>,
}

impl Groups {
    fn new(name: &str) -> Groups {
        let v1 = Path::new("/sys/fs/cgroup/pids");
        let root = if v1.exists() {
            Path::new("/sys/fs/cgroup/unified")
        } else {
            Path::new("/sys/fs/cgroup")
        };
        let name = format!("dsec-guest-{name}-{}", std::process::id());
        let unified = root.join(&name);
        for dir in ["", "agent", "runs"] {
            let dir = unified.join(dir);
            fs::create_dir(&dir).unwrap();
            for file in ["", "cgroup.procs", "cgroup.threads"] {
                chown(dir.join(file), Some(AGENT), Some(AGENT)).unwrap();
            }
        }
        let pids = v1.exists().then(|| v1.join(&name));
        if let Some(pids) = &pids {
            fs::create_dir(pids).unwrap();
            chown(pids, Some(AGENT), Some(AGENT)).unwrap();
        }
        Groups { unified, pids }
    }

    fn fds(&self) -> Vec<(&'static str, Fd)> {
        let mut fds = vec![(
            "runs",
            open(&self.unified.join("runs"), O_RDONLY | O_DIRECTORY),
        )];
        if let Some(pids) = &self.pids {
            fds.push(("pids", open(pids, O_RDONLY | O_DIRECTORY)));
        }
        fds
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        let _ = fs::write(self.unified.join("cgroup.kill"), "1");
        let empty = |dir: &Path| {
            fs::read_to_string(dir.join("cgroup.events"))
                .is_ok_and(|text| text.contains("populated 0"))
        };
        wait_for("the cgroup's end", || empty(&self.unified));
        for dir in [Some(&self.unified), self.pids.as_ref()]
            .into_iter()
            .flatten()
        {
            wait_for("the removal of the cgroup", || {
                let _ = Command::new("find")
                    .arg(dir)
                    .args(["-depth", "-type", "d", "-exec", "rmdir", "{}", "+"])
                    .stderr(std::process::Stdio::null())
                    .status();
                !dir.exists()
            });
        }
    }
}

struct Sandbox {
    guest: Guest,
    groups: Groups,
    _ns: UserNs,
}

fn sandbox(name: &str, config: &[(&str, Value<'_>)]) -> Sandbox {
    let (groups, ns) = (Groups::new(name), UserNs::new());
    let mut fds = groups.fds();
    fds.push(("userns", open(&ns.path("ns/user"), O_RDONLY)));
    let agent = groups.unified.join("agent/cgroup.procs");
    let guest = Guest::start_with(fds, config, move |command| {
        let become_agent = move || {
            fs::write(&agent, "0")?;
            let done = task::set_groups(&[])
                .and_then(|()| task::set_gid(AGENT))
                .and_then(|()| task::set_uid(AGENT));
            done.map_err(|e| std::io::Error::from_raw_os_error(e.0))
        };
        // SAFETY: a small file and three system calls between fork and exec.
        unsafe { command.pre_exec(become_agent) };
    });
    Sandbox {
        guest,
        groups,
        _ns: ns,
    }
}

#[test]
fn commands_run_inside_the_user_namespace() {
    let mut s = sandbox("ids", &[]);
    let text = "id -u; id -g; grep -E 'CapEff|CapBnd|CapInh|CapAmb|NoNewPrivs' /proc/self/status; cat /proc/self/oom_score_adj; cat /proc/self/cgroup | grep -c run-";
    let done = s.guest.shell(text);
    let caps = "00000000a80425fb";
    let zero = "0000000000000000";
    let want = format!("0\n0\nCapInh:\t{zero}\nCapEff:\t{caps}\nCapBnd:\t{caps}\nCapAmb:\t{zero}\nNoNewPrivs:\t0\n500\n");
    let text = String::from_utf8(done.out).unwrap();
    assert!(
        text.starts_with(&want),
        "{text}\n{}",
        String::from_utf8_lossy(&done.err)
    );
    let pid = s.guest.child.id();
    let peek = format!("cat /proc/{pid}/environ; ls /proc/{pid}/fd; readlink /proc/{pid}/exe; kill -9 {pid}; kill -STOP {pid}; echo end");
    let done = s.guest.shell(&peek);
    assert_eq!(done.out, b"end\n");
    assert_eq!(
        s.guest
            .exec(&[("argv", words(&["id", "-u"])), ("user", Value::Str("33"))])
            .out,
        b"33\n"
    );
}

#[test]
fn timeout_kills_double_forks_in_new_sessions() {
    let mut s = sandbox("timeout", &[]);
    let text = "echo partial; setsid sh -c 'setsid sleep 4712 & setsid sh -c \"sleep 4712 & wait\" &' & sleep 4712";
    let done = s.guest.exec(&[
        ("shell", Value::Bin(text.as_bytes())),
        ("timeout_ms", Value::UInt(700)),
    ]);
    assert_eq!(
        (done.out.as_slice(), done.reason.as_str()),
        (b"partial\n".as_slice(), "timeout")
    );
    let left = Command::new("pgrep")
        .args(["-fx", "sleep 4712"])
        .output()
        .unwrap();
    assert!(
        left.stdout.is_empty(),
        "left alive: {}",
        String::from_utf8_lossy(&left.stdout)
    );
    let done = s.guest.shell("echo fine");
    assert_eq!(
        done.out,
        b"fine\n",
        "{done:?} {}",
        String::from_utf8_lossy(&done.raw)
    );
}

#[test]
fn background_children_live_on_and_their_output_is_kept() {
    let mut s = sandbox("linger", &[]);
    let start = std::time::Instant::now();
    let text = b"(sleep 1; echo later) & echo now";
    let exec = [
        ("m", Value::Str("exec")),
        ("id", Value::Str("bg")),
        ("rid", Value::Str("bg")),
        ("shell", Value::Bin(text)),
    ];
    let stream = s.guest.open(&exec, true);
    let done = s.guest.collect(stream);
    assert_eq!(done.out, b"now\n");
    assert!(start.elapsed().as_millis() < 900);
    let mut seen = Vec::new();
    wait_for("the late output", || {
        let output = s.guest.open(
            &[("m", Value::Str("output")), ("id", Value::Str("bg"))],
            true,
        );
        let done = s.guest.collect(output);
        seen = done.out;
        seen == b"now\nlater\n"
    });
    // Its cgroup is reused once it is empty.
    wait_for("the reuse of the leaf", || {
        // More at once than leaves exist besides, so that each must be in use.
        let streams: Vec<u32> = (0..4)
            .map(|_| s.guest.open_shell("sleep 0.1; cat /proc/self/cgroup"))
            .collect();
        let outs: Vec<Vec<u8>> = streams
            .iter()
            .map(|stream| s.guest.collect(*stream).out)
            .collect();
        outs.iter()
            .any(|out| String::from_utf8_lossy(out).contains("runs/run-0\n"))
    });
    assert!(
        fs::read_dir(s.groups.unified.join("runs"))
            .unwrap()
            .filter(|e| e.as_ref().unwrap().path().is_dir())
            .count()
            <= 5
    );
}

#[test]
fn a_fork_bomb_leaves_room_for_the_next_command_and_dies() {
    let mut s = sandbox("bomb", &[("run_pids", Value::UInt(50))]);
    if s.groups.pids.is_none() {
        eprintln!(
            "no v1 pids controller here: run_pids is tested through the launcher on pure cgroup2"
        );
        return;
    }
    let bomb = s.guest.open(
        &[
            ("m", Value::Str("exec")),
            ("id", Value::Str("bomb")),
            ("shell", Value::Bin(b"f() { f | f & }; f; sleep 50")),
            ("start", Value::Bool(true)),
        ],
        true,
    );
    assert!(s.guest.next_frame(bomb).fin);
    std::thread::sleep(std::time::Duration::from_millis(500));
    for _ in 0..20 {
        let done = s.guest.shell("echo in; /bin/echo out");
        assert_eq!(done.out, b"in\nout\n", "{done:?}");
    }
    let done = s.guest.exec(&[
        ("shell", Value::Bin(b"f() { f | f & }; f; sleep 50")),
        ("timeout_ms", Value::UInt(300)),
    ]);
    assert_eq!(done.reason, "timeout");
    let kill = s.guest.open(
        &[
            ("m", Value::Str("signal")),
            ("id", Value::Str("bomb")),
            ("sig", Value::UInt(9)),
            ("tree", Value::Bool(true)),
        ],
        true,
    );
    assert!(s.guest.collect(kill).error.is_none());
    let wait = s.guest.open(
        &[("m", Value::Str("wait")), ("id", Value::Str("bomb"))],
        true,
    );
    s.guest.collect(wait);
    wait_for("the bomb's end", || {
        let events = fs::read_to_string(s.groups.unified.join("runs/run-0/cgroup.events")).unwrap();
        events.contains("populated 0")
    });
    let done = s.guest.shell("echo fine");
    assert_eq!(
        done.out,
        b"fine\n",
        "{done:?} {}",
        String::from_utf8_lossy(&done.raw)
    );
}

#[test]
fn files_are_reached_as_the_user_inside() {
    let mut s = sandbox("files", &[]);
    let dir = std::env::temp_dir().join(format!("dsec-ns-files-{}", std::process::id()));
    fs::create_dir(&dir).unwrap();
    chown(&dir, Some(FIRST), Some(FIRST)).unwrap();
    let path = dir.join("f");
    let text = path.to_str().unwrap();
    let write = [
        ("m", Value::Str("file")),
        ("op", Value::Str("write")),
        ("path", Value::Bin(text.as_bytes())),
    ];
    let stream = s.guest.open(&write, false);
    s.guest
        .send(stream, frame::DATA | frame::FIN, b"from outside");
    let done = s.guest.collect(stream);
    let content = fs::read(&path);
    let stat = fs::metadata(&path).map(|m| std::os::unix::fs::MetadataExt::uid(&m));
    let denied = s.guest.open(
        &[
            ("m", Value::Str("file")),
            ("op", Value::Str("read")),
            ("path", Value::Str("/etc/shadow")),
        ],
        true,
    );
    let denied = s.guest.collect(denied).error;
    fs::remove_dir_all(&dir).unwrap();
    assert_eq!(done.error, None, "{}", String::from_utf8_lossy(&done.raw));
    assert_eq!(
        (content.unwrap(), stat.unwrap()),
        (b"from outside".to_vec(), FIRST)
    );
    assert_eq!(denied.as_deref(), Some("permission"));
}

#[test]
#[ignore = "prints figures; needs a quiet machine and a release build"]
fn figures_inside() {
    let mut s = sandbox("figures", &[("run_pids", Value::UInt(400))]);
    let (mut inside, mut host) = (Vec::new(), Vec::new());
    for _ in 0..500 {
        let start = std::time::Instant::now();
        assert_eq!(
            s.guest.exec(&[("argv", words(&["/bin/true"]))]).exit,
            Some(0)
        );
        inside.push(start.elapsed().as_micros());
        let start = std::time::Instant::now();
        assert!(Command::new("/bin/true").status().unwrap().success());
        host.push(start.elapsed().as_micros());
    }
    inside.sort_unstable();
    host.sort_unstable();
    println!(
        "exec true with user namespace and leaves: p50 {} us; on the host p50 {} us",
        inside[250], host[250]
    );
    println!(
        "VmRSS {} KiB, RssAnon {} KiB",
        s.guest.status_kib("VmRSS"),
        s.guest.status_kib("RssAnon")
    );
}
