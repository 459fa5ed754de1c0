//! Start, end and restart of sandboxes through the socket, on the real kernel. Needs root, gcc, busybox-static, erofs-utils.

mod common;

use std::os::fd::{AsFd, AsRawFd};
use std::process::Command;

use common::*;
use dsec_launch::msg::map;
use dsec_launch::sys;

fn exited(launcher: &mut Launcher, id: &str) -> (Option<i64>, u64) {
    let (event, _) = launcher.next(|m| {
        m.text("t").ok().flatten().as_deref() == Some("exited")
            && m.text("id").ok().flatten().as_deref() == Some(id)
    });
    (
        event.get("status").and_then(Value::as_i64),
        event.uint("oom_kills").expect("uint").expect("present"),
    )
}

#[test]
fn a_container_starts_answers_and_ends() {
    let _turn = turn();
    let mut launcher = Launcher::start();
    let hello = launcher.ask("hello", vec![("proto", 1.into())]);
    assert_eq!(hello.uint("slots").expect("uint"), Some(4095));
    let sandbox = launcher.run("a");
    assert_eq!(
        sandbox.hello,
        "ready hi argc=6 probe channel=3 userns=4 runs=5 pids=6 oom=7"
    );
    assert_eq!(sandbox.sh("echo hello; id -u"), "hello\n0");
    let rows = launcher.kill(&["a"]);
    assert_eq!(rows["a"].get("status"), Some(&Value::from(-9)));
    assert!(launcher.kill(&["a"])["a"]
        .sub("error")
        .expect("map")
        .is_some());
    launcher.finish();
}

#[test]
fn a_batch_starts_and_ends_and_leaves_nothing() {
    let _turn = turn();
    let mut launcher = Launcher::start();
    launcher.run("first");
    launcher.kill(&["first"]);
    launcher.ok("pool", vec![("project", "p".into()), ("target", 4.into())]);
    launcher.settle();
    let before = Census::take(&launcher);
    let ids: Vec<String> = (0..80).map(|i| format!("s{i}")).collect();
    let items = ids
        .iter()
        .map(|id| map(vec![("id", id.as_str().into())]))
        .collect();
    let results = launcher.spawn(container(), items);
    assert!(
        results.values().all(Result::is_ok),
        "{:?}",
        results.values().find_map(|r| r.as_ref().err())
    );
    let slots: std::collections::HashSet<u32> =
        results.values().flatten().map(|r| r.slot).collect();
    assert_eq!(slots.len(), 80);
    launcher.settle();
    assert_eq!(Census::take(&launcher).children, before.children + 80);
    let names: Vec<&str> = ids.iter().map(String::as_str).collect();
    assert_eq!(launcher.kill(&names).len(), 80);
    launcher.settle();
    assert_eq!(Census::take(&launcher), before);
    assert!(launcher.stat("prepared") <= 64);
    launcher.finish();
}

#[test]
fn a_standing_sandbox_costs_the_launcher_four_descriptors() {
    let _turn = turn();
    let mut launcher = Launcher::start();
    launcher.run("warm");
    launcher.ok("pool", vec![("project", "p".into()), ("target", 2.into())]);
    launcher.settle();
    let fds = launcher.fds_in_use();
    let items = (0..20)
        .map(|i| map(vec![("id", format!("s{i}").into())]))
        .collect();
    let results = launcher.spawn(container(), items);
    assert!(results.values().all(Result::is_ok));
    let grown = launcher.fds_in_use() - fds;
    assert!(grown <= 4 * 20, "{grown} descriptors for 20 sandboxes");
    launcher.finish();
}

#[test]
fn an_end_by_itself_is_told() {
    let _turn = turn();
    let mut launcher = Launcher::start();
    let sandbox = launcher.run("a");
    dsec_launch::packet::send(sandbox.channel.as_fd(), b"e7", &[]).expect("send");
    assert_eq!(exited(&mut launcher, "a"), (Some(7), 0));
    let sandbox = launcher.run("b");
    sys::pidfd_kill(sandbox.pidfd.as_fd());
    assert_eq!(exited(&mut launcher, "b"), (Some(-9), 0));
    let sandbox = launcher.run("c");
    assert_eq!(sandbox.ask("m"), "9");
    assert!(sandbox.sh("echo alive").ends_with("alive"));
    let rows = launcher.kill(&["c"]);
    assert!(rows["c"].uint("oom_kills").expect("uint") >= Some(1));
    launcher.finish();
}

#[test]
fn a_launcher_killed_loses_no_sandbox() {
    let _turn = turn();
    let mut launcher = Launcher::start();
    let (a, b) = (launcher.run("a"), launcher.run("b"));
    launcher.process.kill().expect("kill");
    launcher.process.wait().expect("wait");
    assert_eq!(a.sh("echo still here"), "still here");
    let name = launcher.name.clone();
    let mut next = Launcher::start_named(&name);
    // The old one's groups are not swept while they hold processes.
    assert_eq!(b.sh("echo me too"), "me too");
    let row = |s: &Running| {
        map(vec![
            ("id", s.id.as_str().into()),
            ("pid", s.pid.into()),
            ("slot", s.slot.into()),
            ("spec_tag", Value::Binary(vec![1])),
        ])
    };
    let rows = Value::Array(vec![row(&a), row(&b)]);
    let fds = [&a, &b]
        .iter()
        .flat_map(|s| [s.pidfd.as_raw_fd(), s.channel.as_raw_fd()])
        .collect::<Vec<_>>();
    let seq = next.send("adopt", vec![("sandboxes", rows)], &fds);
    assert_eq!(
        next.answer(seq).0.text("t").expect("t").as_deref(),
        Some("ok")
    );
    let seq = next.send("list", vec![], &[]);
    let (listed, fds) = next.answer(seq);
    assert_eq!(
        (listed.maps("sandboxes").expect("rows").len(), fds.len()),
        (2, 4)
    );
    // Neither of the adopted ones' slots is given to a third.
    let c = next.run("c");
    assert!(c.slot != a.slot && c.slot != b.slot);
    dsec_launch::packet::send(a.channel.as_fd(), b"e5", &[]).expect("send");
    let (status, _) = exited(&mut next, "a");
    assert!(matches!(status, Some(5) | None), "{status:?}");
    next.kill(&["b", "c"]);
    next.finish();
}

#[test]
fn a_new_controller_replaces_the_old_one() {
    let _turn = turn();
    let mut launcher = Launcher::start();
    let sandbox = launcher.run("a");
    launcher.reconnect();
    let seq = launcher.send("list", vec![], &[]);
    let (listed, fds) = launcher.answer(seq);
    let rows = listed.maps("sandboxes").expect("rows");
    assert_eq!(
        (rows[0].need_text("id").expect("id").as_str(), fds.len()),
        ("a", 2)
    );
    assert_eq!(sandbox.sh("echo on"), "on");
    launcher.finish();
}

#[test]
fn shutdown_without_kill_leaves_sandboxes_alone() {
    let _turn = turn();
    let mut launcher = Launcher::start();
    let sandbox = launcher.run("a");
    launcher.ok("shutdown", vec![("kill", false.into())]);
    assert!(launcher.process.wait().expect("wait").success());
    assert_eq!(sandbox.sh("echo on"), "on");
    sys::pidfd_kill(sandbox.pidfd.as_fd());
    assert!(sys::poll_in(sandbox.pidfd.as_fd(), Some(WAIT)));
    // The next launcher of the instance sweeps what the sandbox left.
    let name = launcher.name.clone();
    Launcher::start_named(&name).finish();
}

#[test]
fn malformed_messages_get_typed_errors() {
    let _turn = turn();
    let mut launcher = Launcher::start();
    let huge = vec![0xc1; 200_000];
    for data in [
        &b"\xc1"[..],
        b"\x01",
        b"\x81",
        b"\x80",
        &[0x91; 4000],
        &huge,
    ] {
        launcher.send_raw(data);
        let (answer, _) = launcher.next(|m| m.text("t").ok().flatten().as_deref() == Some("error"));
        assert_eq!(answer.need_text("code").expect("code"), "invalid");
    }
    let cases = [
        ("moon", vec![], "invalid"),
        ("spawn", vec![], "invalid"),
        ("spawn", vec![("items", 5.into())], "invalid"),
        (
            "kill",
            vec![("ids", Value::Array(vec![5.into()]))],
            "invalid",
        ),
        (
            "layer",
            vec![("name", "x".into()), ("path", "/absent".into())],
            "not_found",
        ),
        (
            "layer",
            vec![("name", "x".into()), ("path", "/etc/passwd".into())],
            "kernel",
        ),
        ("unlayer", vec![("name", "x".into())], "not_found"),
        (
            "adopt",
            vec![("sandboxes", Value::Array(vec![map(vec![])]))],
            "invalid",
        ),
    ];
    for (kind, fields, code) in cases {
        let answer = launcher.ask(kind, fields);
        assert_eq!(
            answer.text("code").expect("code").as_deref(),
            Some(code),
            "{kind}: {answer:?}"
        );
    }
    let sandbox = launcher.run("a");
    let answer = launcher.ask("unlayer", vec![("name", "base".into())]);
    assert_eq!(answer.text("code").expect("code").as_deref(), Some("busy"));
    let error = launcher
        .spawn_one(vec![("id", "a".into())])
        .err()
        .expect("a second `a`");
    assert_eq!(error.0, "exists");
    assert_eq!(sandbox.sh("echo on"), "on");
    launcher.finish();
}

/// A name, the fields that make it fail, and the code it fails with.
type Case = (&'static str, Vec<(&'static str, Value)>, &'static str);

#[test]
fn a_spawn_that_fails_leaves_nothing() {
    let _turn = turn();
    let mut launcher = Launcher::start();
    launcher.run("warm");
    launcher.kill(&["warm"]);
    let fds = launcher.fds_in_use();
    let before = Census::take(&launcher);
    let not_a_program = fixture().dir.join("text");
    std::fs::write(&not_a_program, "no program").expect("write");
    let mute = texts(&["probe", "channel=%channel", "mute"]);
    let cases: Vec<Case> = vec![
        (
            "no layer",
            vec![("layers", texts(&["absent"]))],
            "not_found",
        ),
        ("no program", vec![("exe", "/absent".into())], "not_found"),
        (
            "not a program",
            vec![("exe", not_a_program.to_str().expect("utf-8").into())],
            "kernel",
        ),
        (
            "no filter",
            vec![("seccomp", "/absent".into())],
            "not_found",
        ),
        (
            "bad filter",
            vec![("seccomp", not_a_program.to_str().expect("utf-8").into())],
            "invalid",
        ),
        (
            "bad source",
            vec![(
                "mounts",
                Value::Array(vec![map(vec![
                    ("kind", "bind".into()),
                    ("source", "/absent".into()),
                    ("path", "/x".into()),
                ])]),
            )],
            "not_found",
        ),
        (
            "ends early",
            vec![("argv", texts(&["probe", "channel=%channel", "exit=3"]))],
            "kernel",
        ),
        (
            "is mute",
            vec![("argv", mute), ("ready_ms", 100.into())],
            "timeout",
        ),
        (
            "too little memory",
            vec![("limits", map(vec![("memory", 65_536.into())]))],
            "invalid",
        ),
        (
            "no template",
            vec![(
                "upper",
                map(vec![
                    ("kind", "image".into()),
                    ("template", "/absent".into()),
                    ("dir", "/tmp".into()),
                ]),
            )],
            "not_found",
        ),
    ];
    for (name, mut fields, code) in cases {
        fields.push(("id", "x".into()));
        let error = launcher
            .spawn_one(fields)
            .err()
            .unwrap_or_else(|| panic!("{name} started"));
        assert_eq!(error.0, code, "{name}: {}", error.1);
    }
    // The text that is no program was opened, and stays in the cache of programs.
    assert_eq!(launcher.fds_in_use(), fds + 1);
    assert_eq!(Census::take(&launcher), before);
    let sandbox = launcher.run("x");
    assert_eq!(sandbox.sh("echo on"), "on");
    launcher.finish();
}

#[test]
fn sandboxes_killed_while_they_start_are_cleaned_up() {
    let _turn = turn();
    let mut launcher = Launcher::start();
    launcher.run("warm");
    launcher.kill(&["warm"]);
    launcher.settle();
    let before = Census::take(&launcher);
    let stop = std::sync::atomic::AtomicBool::new(false);
    let name = launcher.name.clone();
    std::thread::scope(|scope| {
        // Kills whatever appears in any of the instance's groups, at whatever stage.
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                for slot in std::fs::read_dir(format!("/sys/fs/cgroup/unified/{name}"))
                    .into_iter()
                    .flatten()
                    .flatten()
                {
                    let _ = std::fs::write(slot.path().join("cgroup.kill"), "1");
                }
            }
        });
        let mut failed = 0;
        for round in 0..20 {
            let items = (0..10)
                .map(|i| map(vec![("id", format!("k{round}-{i}").into())]))
                .collect();
            for (id, result) in launcher.spawn(container(), items) {
                match result {
                    Err((code, _)) => {
                        assert!(["kernel", "not_found"].contains(&code.as_str()), "{code}");
                        failed += 1;
                    }
                    Ok(_) => drop(exited(&mut launcher, &id)),
                }
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(failed > 0, "nothing was hit while it started");
    });
    launcher.settle();
    assert_eq!(Census::take(&launcher), before);
    assert_eq!(launcher.run("after").sh("echo on"), "on");
    launcher.finish();
}

#[test]
fn an_image_upper_is_a_disk_of_its_own() {
    let _turn = turn();
    let template = fixture().dir.join("template.ext4");
    let file = std::fs::File::create(&template).expect("create");
    file.set_len(32 << 20).expect("truncate");
    let made = Command::new("mkfs.ext4")
        .args(["-q", "-O", "^has_journal", "-m", "0"])
        .arg(&template)
        .status();
    assert!(made.expect("mkfs.ext4").success());
    let mut launcher = Launcher::start();
    launcher.run("warm");
    launcher.kill(&["warm"]);
    launcher.settle();
    let before = Census::take(&launcher);
    let upper = map(vec![
        ("kind", "image".into()),
        ("template", template.to_str().expect("utf-8").into()),
        ("dir", fixture().dir.to_str().expect("utf-8").into()),
        ("bytes", (32 << 20).into()),
    ]);
    let sandbox = launcher
        .spawn_one(vec![("id", "a".into()), ("upper", upper)])
        .unwrap_or_else(|e| panic!("{e:?}"));
    assert_eq!(Census::take(&launcher).loops, before.loops + 1);
    assert_eq!(Census::take(&launcher).mounts, before.mounts);
    let answer =
        sandbox.sh("dd if=/dev/zero of=/root/big bs=1M count=64 2>&1; stat -c %u:%g /root/big");
    assert!(
        answer.contains("No space left") && answer.ends_with("0:0"),
        "{answer}"
    );
    launcher.kill(&["a"]);
    launcher.settle();
    assert_eq!(Census::take(&launcher), before);
    launcher.finish();
}

#[test]
fn a_helper_of_the_host_needs_no_layers() {
    let _turn = turn();
    let mut launcher = Launcher::start();
    let probe = fixture().probe.to_str().expect("utf-8");
    let item = map(vec![
        ("id", "helper".into()),
        ("exe", probe.into()),
        ("argv", texts(&["probe", "channel=%channel"])),
        ("fds", texts(&["channel"])),
        (
            "identity",
            map(vec![("uid", 12_345.into()), ("gid", 12_346.into())]),
        ),
        ("ready_ms", 10_000.into()),
    ]);
    let result = launcher
        .spawn(map(vec![]), vec![item])
        .into_values()
        .next()
        .expect("one");
    let helper = result.unwrap_or_else(|e| panic!("{e:?}"));
    let answer = helper.ask("aecho $(id -u):$(id -g); test -e /proc/self/status && echo host; sleep 1000 >/dev/null 2>&1 &");
    assert!(answer.starts_with("12345:12346\nhost"), "{answer}");
    // Without a pid namespace its children outlive it; they too must be gone after the kill.
    launcher.kill(&["helper"]);
    launcher.finish();
}
