//! What a sandbox sees and may do, and what the next tenant of a slot can see of the last one.

mod common;

use common::*;
use dsec_launch::msg::map;

fn read(path: String) -> String {
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"))
}

#[test]
fn namespaces_ids_and_limits_are_as_asked() {
    let _turn = turn();
    let mut launcher = Launcher::start();
    let sandbox = launcher.run("a");
    let pid = sandbox.pid;
    for ns in ["pid", "mnt", "net", "ipc", "uts", "cgroup"] {
        let of = |who: String| std::fs::read_link(format!("/proc/{who}/ns/{ns}")).expect("link");
        assert_ne!(of(pid.to_string()), of("self".into()), "{ns}");
    }
    let status = read(format!("/proc/{pid}/status"));
    let agent = launcher.uid_base + 65_536 * 4095 + sandbox.slot;
    assert!(
        status.contains(&format!("Uid:\t{agent}\t{agent}\t{agent}\t{agent}")),
        "{status}"
    );
    assert!(
        status.contains("CapEff:\t0000000000000000")
            && status.contains("CapPrm:\t0000000000000000"),
        "{status}"
    );
    for line in [
        "SigBlk:\t0000000000000000",
        "SigIgn:\t0000000000000000",
        "SigPnd:\t0000000000000000",
    ] {
        assert!(status.contains(line), "{status}");
    }
    assert_eq!(sandbox.sh("hostname"), "box");
    let first = launcher.uid_base + 65_536 * sandbox.slot;
    assert_eq!(
        sandbox
            .sh("cat /proc/self/uid_map")
            .split_whitespace()
            .collect::<Vec<_>>(),
        ["0", &first.to_string(), "65536"]
    );
    let v1 = |name: &str, file: &str| {
        read(format!(
            "/sys/fs/cgroup/{name}/{}/s{}/{file}",
            launcher.name, sandbox.slot
        ))
    };
    if std::path::Path::new("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists() {
        assert_eq!(
            v1("memory", "memory.limit_in_bytes").trim(),
            (64 << 20).to_string()
        );
        assert_eq!(v1("cpu", "cpu.cfs_quota_us").trim(), "100000");
        assert_eq!(v1("pids", "pids.max").trim(), "32");
        assert_eq!(v1("memory", "tasks").trim(), pid.to_string());
        assert_eq!(v1("pids", "tasks").trim(), "");
        assert!(read(format!("/proc/{pid}/cgroup"))
            .contains(&format!("/{}/s{}/agent", launcher.name, sandbox.slot)));
    }
    let owners = [
        ("s", agent),
        ("s/runs", agent),
        ("s/runs/cgroup.procs", agent),
        ("s/cgroup.procs", agent),
        ("s/agent", 0),
    ];
    for (path, owner) in owners {
        let full = format!(
            "/sys/fs/cgroup/unified/{}/{}",
            launcher.name,
            path.replacen('s', &format!("s{}", sandbox.slot), 1)
        );
        let uid = std::os::unix::fs::MetadataExt::uid(&std::fs::metadata(&full).expect("stat"));
        assert_eq!(uid, owner, "{full}");
    }
    launcher.finish();
}

#[test]
fn no_descriptor_strays_in() {
    let _turn = turn();
    let mut launcher = Launcher::start();
    launcher.run("other");
    let sandbox = launcher.run("a");
    let mut fds: Vec<(u32, String)> = std::fs::read_dir(format!("/proc/{}/fd", sandbox.pid))
        .expect("fd")
        .map(|e| e.expect("entry"))
        .map(|e| {
            let target = std::fs::read_link(e.path())
                .expect("link")
                .to_string_lossy()
                .into_owned();
            (
                e.file_name().to_string_lossy().parse().expect("number"),
                target,
            )
        })
        .collect();
    fds.sort();
    let kinds: Vec<&str> = fds
        .iter()
        .map(|(_, target)| target.split([':', '[']).next().expect("kind"))
        .collect();
    assert_eq!(
        kinds[..4],
        ["/dev/null", "/dev/null", "/dev/null", "socket"],
        "{fds:?}"
    );
    assert_eq!(kinds.len(), 8, "{fds:?}");
    assert!(
        kinds[4].starts_with("user")
            && kinds[5].ends_with("runs")
            && kinds[7].ends_with("memory.oom_control"),
        "{fds:?}"
    );
    launcher.finish();
}

#[test]
fn the_file_system_shows_no_more_than_it_should() {
    let _turn = turn();
    let mut launcher = Launcher::start();
    let files = Value::Array(vec![map(vec![
        ("path", "/etc/deep/er/name".into()),
        ("data", Value::Binary(b"content".to_vec())),
        ("mode", 0o640.into()),
    ])]);
    let sandbox = launcher
        .spawn_one(vec![("id", "a".into()), ("files", files)])
        .unwrap_or_else(|e| panic!("{e:?}"));
    assert_eq!(
        sandbox.sh("cat /etc/deep/er/name; stat -c ' %a %u:%g' /etc/deep/er/name /etc/deep"),
        "content 640 0:0\n 755 0:0"
    );
    // Files of the image keep their owners, and may be changed.
    assert_eq!(
        sandbox.sh("stat -c %u:%g /etc/passwd; chown 5:6 /etc/passwd; stat -c %u:%g /etc/passwd"),
        "0:0\n5:6"
    );
    for path in ["/proc/interrupts", "/proc/keys", "/proc/timer_list"] {
        assert_eq!(
            sandbox.sh(&format!("cat {path}; stat -c %F {path}")),
            "character special file",
            "{path}"
        );
    }
    assert_eq!(
        sandbox.sh("ls -A /sys/firmware; ls /dev | cat"),
        "fd\nfull\nnull\nptmx\npts\nrandom\nshm\nstderr\nstdin\nstdout\ntty\nurandom\nzero"
    );
    for command in [
        "echo 1 > /proc/sys/net/ipv4/ip_forward",
        "echo b > /proc/sysrq-trigger",
        "touch /dev/x",
        "touch /sys/firmware/x",
        "mount -t tmpfs x /tmp",
        "cat /proc/1/environ",
        "ls /proc/1/root/",
    ] {
        let answer = sandbox.ask(&format!("s{command}"));
        assert!(!answer.ends_with("[0]"), "{command}: {answer}");
    }
    assert_eq!(
        sandbox.sh("echo x > /dev/null; touch /dev/shm/y; ls /dev/shm"),
        "y"
    );
    // Neither the host's mounts nor the parts of the overlay are to be seen.
    let mounts = sandbox.sh("cat /proc/self/mountinfo");
    for line in mounts.lines() {
        let point = line.split(' ').nth(4).expect("mount point");
        assert!(
            point == "/"
                || ["/proc", "/dev", "/sys/firmware"]
                    .iter()
                    .any(|p| point.starts_with(p)),
            "{line}"
        );
    }
    assert!(
        !mounts.contains("/parts") && !mounts.contains("erofs"),
        "{mounts}"
    );
    // The quota of the upper holds.
    assert!(sandbox
        .sh("dd if=/dev/zero of=/tmp/big bs=1M count=64 2>&1; true")
        .contains("No space left"));
    launcher.finish();
}

#[test]
fn binds_of_files_and_directories() {
    let _turn = turn();
    let mut launcher = Launcher::start();
    let source = fixture().dir.join("shared");
    std::fs::create_dir_all(&source).expect("mkdir");
    std::fs::write(source.join("file"), "from the host").expect("write");
    let path = |p: &std::path::Path| Value::from(p.to_str().expect("utf-8"));
    let bind = |from: &std::path::Path, to: &str| {
        map(vec![
            ("kind", "bind".into()),
            ("source", path(from)),
            ("path", to.into()),
            ("ro", true.into()),
        ])
    };
    let mounts = Value::Array(vec![
        bind(&source, "/mnt/new/dir"),
        bind(&source.join("file"), "/mnt/one"),
    ]);
    let sandbox = launcher
        .spawn_one(vec![("id", "a".into()), ("mounts", mounts)])
        .unwrap_or_else(|e| panic!("{e:?}"));
    assert_eq!(
        sandbox.sh("cat /mnt/new/dir/file; cat /mnt/one"),
        "from the hostfrom the host"
    );
    assert_eq!(sandbox.sh("stat -c %u /mnt/one /mnt /mnt/new"), "0\n0\n0");
    assert!(!sandbox.ask("stouch /mnt/new/dir/x").ends_with("[0]"));
    launcher.finish();
}

/// Ends `a` and starts `b` in the same slot; tells whether the namespaces were kept.
fn next_tenant(launcher: &mut Launcher, last: Running) -> (Running, bool) {
    // A slot that the filler made meanwhile would be taken first.
    launcher.settle();
    let (slot, renewed) = (last.slot, launcher.stat("slots_renewed"));
    launcher.kill(&[&last.id]);
    let kept = launcher.stat("slots_renewed") == renewed;
    let next = launcher.run("next");
    assert_eq!(
        next.slot, slot,
        "the pool gives back the slot last put there"
    );
    (next, kept)
}

const NETWORK: &str = "cat /proc/net/tcp /proc/net/dev /proc/net/snmp /proc/net/netstat /proc/net/snmp6 /proc/net/sockstat";

/// Without the figures that count the whole host.
fn network(sandbox: &Running) -> String {
    let lines: Vec<String> = sandbox
        .sh(NETWORK)
        .lines()
        .map(|line| {
            match line
                .split_once(" orphan ")
                .or_else(|| line.split_once(" mem "))
            {
                Some((own, rest)) => format!(
                    "{own} {}",
                    rest.split(" tw ")
                        .nth(1)
                        .map_or("", |t| t.split(' ').next().unwrap_or(""))
                ),
                None => line.to_owned(),
            }
        })
        .collect();
    lines.join("\n")
}

#[test]
fn a_slot_that_did_nothing_is_reused() {
    let _turn = turn();
    let mut launcher = Launcher::start();
    assert!(launcher
        .ask("stats", vec![])
        .boolean("reuses")
        .expect("bool")
        .expect("present"));
    let first = launcher.run("first");
    first.sh("echo x > /tmp/file; touch /dev/shm/y");
    let (next, kept) = next_tenant(&mut launcher, first);
    assert!(kept);
    assert_eq!(next.sh("ls /tmp /dev/shm | cat"), "/dev/shm:\n\n/tmp:");
    launcher.finish();
}

#[test]
fn traffic_and_its_traces_end_with_the_tenant() {
    let _turn = turn();
    let mut launcher = Launcher::start();
    let first = launcher.run("first");
    let fresh = network(&first);
    first.ask("t");
    assert!(
        first.sh("cat /proc/net/tcp").contains(":1092"),
        "no TIME_WAIT to be seen"
    );
    assert_ne!(network(&first), fresh);
    let (next, kept) = next_tenant(&mut launcher, first);
    assert!(!kept);
    assert_eq!(network(&next), fresh);
    launcher.finish();
}

#[test]
fn a_changed_sysctl_ends_with_the_tenant() {
    let _turn = turn();
    let mut launcher = Launcher::start();
    let proc_only = Value::Array(vec![map(vec![("kind", "proc".into())])]);
    let first = launcher
        .spawn_one(vec![("id", "first".into()), ("mounts", proc_only)])
        .unwrap_or_else(|e| panic!("{e:?}"));
    let file = "/proc/sys/net/ipv4/ip_default_ttl";
    let before = first.sh(&format!("cat {file}"));
    first.sh(&format!("echo 7 > {file}"));
    assert_eq!(first.sh(&format!("cat {file}")), "7");
    let (next, kept) = next_tenant(&mut launcher, first);
    assert!(!kept);
    assert_eq!(next.sh(&format!("cat {file}")), before);
    launcher.finish();
}

#[test]
fn a_changed_network_ends_with_the_tenant() {
    let _turn = turn();
    let mut launcher = Launcher::start();
    let first = launcher.run("first");
    // An address sends no packet, so the counters alone would not show it.
    first.sh("/bin/busybox ip addr add 10.9.8.7/24 dev lo");
    let (next, kept) = next_tenant(&mut launcher, first);
    assert!(!kept);
    assert!(!next.sh("/bin/busybox ip addr").contains("10.9.8.7"));
    launcher.finish();
}

#[test]
fn keys_end_with_the_tenant() {
    let _turn = turn();
    let mut launcher = Launcher::start();
    let first = launcher.run("first");
    assert_eq!(
        first.ask("k"),
        "found",
        "no key can be made, so this test would prove nothing"
    );
    assert_eq!(first.ask("K"), "found");
    let (next, kept) = next_tenant(&mut launcher, first);
    assert!(!kept);
    assert_eq!(next.ask("K"), "none");
    launcher.finish();
}

#[test]
fn cgroup_counters_and_limits_end_with_the_tenant() {
    let _turn = turn();
    let mut launcher = Launcher::start();
    let first = launcher.run("first");
    first.ask("m");
    let slot = first.slot;
    launcher.settle();
    launcher.kill(&["first"]);
    let limits = map(vec![("memory", (100 << 20).into())]);
    let next = launcher
        .spawn_one(vec![("id", "next".into()), ("limits", limits)])
        .unwrap_or_else(|e| panic!("{e:?}"));
    assert_eq!(next.slot, slot);
    let file = |name: &str| {
        read(format!(
            "/sys/fs/cgroup/memory/{}/s{slot}/{name}",
            launcher.name
        ))
    };
    assert!(file("memory.oom_control").contains("oom_kill 0"));
    assert_eq!(file("memory.failcnt").trim(), "0");
    assert_eq!(
        file("memory.limit_in_bytes").trim(),
        (100 << 20).to_string()
    );
    assert!(
        file("memory.max_usage_in_bytes")
            .trim()
            .parse::<u64>()
            .expect("number")
            < 60 << 20
    );
    assert_eq!(
        read(format!(
            "/sys/fs/cgroup/pids/{}/s{slot}/pids.max",
            launcher.name
        ))
        .trim(),
        "max"
    );
    assert_eq!(
        read(format!(
            "/sys/fs/cgroup/cpu/{}/s{slot}/cpu.cfs_quota_us",
            launcher.name
        ))
        .trim(),
        "-1"
    );
    launcher.finish();
}

#[test]
fn slots_stay_within_their_project() {
    let _turn = turn();
    let mut launcher = Launcher::start();
    let first = launcher.run("first");
    let slot = first.slot;
    launcher.settle();
    launcher.kill(&["first"]);
    let other = launcher
        .spawn_one(vec![("id", "other".into()), ("project", "q".into())])
        .unwrap_or_else(|e| panic!("{e:?}"));
    assert_ne!(other.slot, slot);
    launcher.finish();
}
