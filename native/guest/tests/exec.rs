//! Commands through the real binary, without namespaces.

mod support;
use dsec_wire::{frame, Value};
use std::time::Duration;
use support::{words, Guest};

#[test]
fn hello_and_simple_commands() {
    let mut guest = Guest::start();
    let hello = guest.hello.clone();
    let hello = Value::decode(&hello).unwrap();
    assert_eq!(hello.get("epoch").and_then(Value::as_u64), Some(1));
    let done = guest.exec(&[("argv", words(&["echo", "a b"]))]);
    assert_eq!(
        (done.out.as_slice(), done.exit, done.reason.as_str()),
        (b"a b\n".as_slice(), Some(0), "exit")
    );
    let done = guest.shell("printf 'a\\377b\\n'; printf '\\376' >&2; exit 3");
    assert_eq!(
        (done.out.as_slice(), done.err.as_slice(), done.exit),
        (b"a\xffb\n".as_slice(), b"\xfe".as_slice(), Some(3))
    );
    let done = guest.shell("kill -TERM $$");
    assert_eq!(
        (done.signal, done.reason.as_str(), done.exit),
        (Some(15), "signal", None)
    );
    assert_eq!(guest.shell("exit 124").exit, Some(124));
    assert_eq!(guest.shell("cat; echo end").out, b"end\n");
    assert_eq!(
        guest
            .shell("yes aaaaaaaa | head -n 2; echo ${PIPESTATUS[0]}")
            .out,
        b"aaaaaaaa\naaaaaaaa\n141\n"
    );
}

#[test]
fn a_thousand_short_commands_lose_nothing() {
    let mut guest = Guest::start();
    for n in 0..1000 {
        let text = n.to_string();
        let done = guest.exec(&[("argv", words(&["echo", &text]))]);
        assert_eq!(String::from_utf8(done.out).unwrap(), format!("{n}\n"));
    }
    let before = guest.status_kib("RssAnon");
    assert!(
        before < 400,
        "the guest holds {before} KiB after 1,000 commands"
    );
}

#[test]
fn typed_errors_for_what_cannot_start() {
    let mut guest = Guest::start();
    let error = |d: support::Done| d.error.unwrap_or_default();
    assert_eq!(
        error(guest.exec(&[("argv", words(&["/no/such"]))])),
        "not_found"
    );
    assert_eq!(
        error(guest.exec(&[("argv", words(&["nosuchprogram"]))])),
        "not_found"
    );
    assert_eq!(
        error(guest.exec(&[("argv", words(&["/etc/passwd"]))])),
        "permission"
    );
    assert_eq!(
        error(guest.exec(&[("argv", words(&["true"])), ("cwd", Value::Bin(b"/no/dir"))])),
        "not_found"
    );
    assert_eq!(
        error(guest.exec(&[
            ("argv", words(&["true"])),
            ("user", Value::Str("nobodyknows"))
        ])),
        "not_found"
    );
    assert_eq!(
        error(guest.exec(&[("argv", Value::Array(vec![]))])),
        "invalid"
    );
    let stream = guest.open(&[("m", Value::Str("dance"))], false);
    assert_eq!(error(guest.collect(stream)), "unsupported");
    guest.send(stream + 2, frame::OPEN, b"\xc1");
    assert_eq!(error(guest.collect(stream + 2)), "invalid");
}

#[test]
fn timeout_returns_partial_output_and_kills() {
    let mut guest = Guest::start();
    let start = std::time::Instant::now();
    let done = guest.exec(&[
        ("shell", Value::Bin(b"echo before; sleep 60; echo after")),
        ("timeout_ms", Value::UInt(500)),
    ]);
    let took = start.elapsed().as_millis();
    assert_eq!(
        (done.out.as_slice(), done.reason.as_str(), done.signal),
        (b"before\n".as_slice(), "timeout", Some(9))
    );
    assert!((490..2500).contains(&took), "{took} ms");
    assert_eq!(guest.shell("echo fine").out, b"fine\n");
}

#[test]
fn background_children_do_not_delay_the_result() {
    let mut guest = Guest::start();
    let start = std::time::Instant::now();
    let done = guest.shell("sleep 47 & echo $!");
    assert!(start.elapsed().as_secs() < 5);
    let pid: i32 = String::from_utf8(done.out).unwrap().trim().parse().unwrap();
    assert!(
        std::path::Path::new(&format!("/proc/{pid}")).exists(),
        "the background child is gone"
    );
    dsec_guest::sys::task::kill(pid, 9).unwrap();
}

#[test]
fn stdin_comes_back_through_cat() {
    let mut guest = Guest::start();
    let data: Vec<u8> = (0..8u32 << 20)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    let request = [
        ("m", Value::Str("exec")),
        ("id", Value::Str("cat")),
        ("argv", words(&["cat"])),
        ("stdin", Value::Bool(true)),
        ("start", Value::Bool(true)),
    ];
    let input = guest.open(&request, false);
    let pid = guest.next_frame(input);
    assert_eq!((pid.kind, pid.fin), (frame::MSG, false));
    let follow = [
        ("m", Value::Str("output")),
        ("id", Value::Str("cat")),
        ("follow", Value::Bool(true)),
    ];
    let output = guest.open(&follow, false);
    let (mut window, mut sent, mut back) = (frame::WINDOW as usize, 0, Vec::new());
    loop {
        while window > 0 && sent < data.len() {
            let n = window.min(50_000).min(data.len() - sent);
            guest.send(input, frame::DATA, &data[sent..sent + n]);
            sent += n;
            window -= n;
            if sent == data.len() {
                guest.send(input, frame::DATA | frame::FIN, b"");
            }
        }
        while let Some(got) = guest.frame_within(input, std::time::Duration::ZERO) {
            if got.kind == frame::CREDIT {
                window += u32::from_le_bytes(got.payload.as_slice().try_into().unwrap()) as usize;
            }
        }
        let Some(got) = guest.frame_within(output, std::time::Duration::from_millis(20)) else {
            continue;
        };
        match got.kind {
            frame::DATA => {
                assert_eq!(
                    u64::from_le_bytes(got.payload[1..9].try_into().unwrap()),
                    back.len() as u64
                );
                back.extend_from_slice(&got.payload[9..]);
                guest.send(
                    output,
                    frame::CREDIT,
                    &(got.payload.len() as u32).to_le_bytes(),
                );
            }
            _ => {
                assert!(got.fin, "{got:?}");
                break;
            }
        }
    }
    assert!(
        back == data,
        "got {} of {} bytes, or others",
        back.len(),
        data.len()
    );
}

#[test]
fn an_open_stdin_does_not_hold_the_end() {
    let mut guest = Guest::start();
    let done = guest.exec(&[
        ("argv", words(&["echo", "hi"])),
        ("stdin", Value::Bool(true)),
    ]);
    assert_eq!(
        (done.out.as_slice(), done.exit),
        (b"hi\n".as_slice(), Some(0))
    );
}

#[test]
fn a_follower_gets_all_of_100_mib_in_bounded_memory() {
    let mut guest = Guest::start();
    let request = [
        ("m", Value::Str("exec")),
        ("id", Value::Str("big")),
        (
            "shell",
            Value::Bin(b"head -c 104857600 /dev/zero | tr '\\0' a"),
        ),
        ("cap", Value::UInt(1 << 20)),
        ("start", Value::Bool(true)),
    ];
    let start = guest.open(&request, true);
    assert!(guest.next_frame(start).fin);
    let follow = guest.open(
        &[
            ("m", Value::Str("output")),
            ("id", Value::Str("big")),
            ("follow", Value::Bool(true)),
        ],
        false,
    );
    let done = guest.collect(follow);
    assert_eq!(done.out.len(), 104_857_600);
    assert!(done.out.iter().all(|b| *b == b'a'));
    let rss = guest.status_kib("VmHWM");
    assert!(rss < 4096, "{rss} KiB");
}

/// A start of 3 MB with a cap of 100 kB.
fn start_large(guest: &mut Guest, id: &'static str) {
    let request = [
        ("m", Value::Str("exec")),
        ("id", Value::Str(id)),
        ("shell", Value::Bin(b"head -c 3000000 /dev/zero")),
        ("cap", Value::UInt(100_000)),
        ("start", Value::Bool(true)),
    ];
    let start = guest.open(&request, true);
    assert!(guest.next_frame(start).fin);
}

#[test]
fn a_start_waits_a_while_for_its_first_reader() {
    let mut guest = Guest::start();
    start_large(&mut guest, "read");
    std::thread::sleep(Duration::from_millis(500));
    let follow = guest.open(
        &[
            ("m", Value::Str("output")),
            ("id", Value::Str("read")),
            ("follow", Value::Bool(true)),
        ],
        false,
    );
    assert_eq!(guest.collect(follow).out.len(), 3_000_000);
    // Nobody reads this one: it goes on by itself, with its middle dropped.
    start_large(&mut guest, "unread");
    let wait = guest.open(
        &[
            ("m", Value::Str("wait")),
            ("id", Value::Str("unread")),
            ("timeout_ms", Value::UInt(20_000)),
        ],
        true,
    );
    let done = guest.collect(wait);
    let result = Value::decode(&done.raw).unwrap();
    assert_eq!(result.get("exit").and_then(Value::as_u64), Some(0));
    assert!(result.get("out_gap").and_then(Value::as_array).is_some());
}

#[test]
fn the_middle_is_dropped_beyond_the_cap() {
    let mut guest = Guest::start();
    let done = guest.exec(&[
        ("shell", Value::Bin(b"seq 1 100000; echo end")),
        ("cap", Value::UInt(10_000)),
    ]);
    assert!(done.out.starts_with(b"1\n2\n3\n") && done.out.ends_with(b"99999\n100000\nend\n"));
    assert_eq!(done.out.len(), 10_000);
    let result = Value::decode(&done.raw).unwrap();
    let gap: Vec<u64> = result
        .get("out_gap")
        .unwrap()
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v.as_u64().unwrap())
        .collect();
    let total = result.get("out_total").unwrap().as_u64().unwrap();
    assert_eq!((gap, total), (vec![5000, 588_899 - 5000], 588_899));
    let large = guest.exec(&[
        ("shell", Value::Bin(b"head -c 3000000 /dev/zero")),
        ("cap", Value::UInt(1_000_000)),
    ]);
    assert_eq!(large.out.len(), 1_000_000);
}

#[test]
fn a_repeat_of_a_request_id_runs_once() {
    let mut guest = Guest::start();
    let file = std::env::temp_dir().join(format!("dsec-rid-{}", std::process::id()));
    let text = format!("echo x >> {0}; sleep 0.3; wc -l < {0}", file.display());
    let request = |id: &'static str| {
        vec![
            ("m", Value::Str("exec")),
            ("id", Value::Str(id)),
            ("rid", Value::Str("r1")),
        ]
    };
    let mut first = request("a");
    first.push(("shell", Value::Bin(text.as_bytes())));
    let (one, two) = (guest.open(&first, false), guest.open(&first, false));
    assert_eq!(guest.collect(one).out, b"1\n");
    assert_eq!(guest.collect(two).out, b"1\n");
    let later = guest.open(&first, false);
    assert_eq!(guest.collect(later).out, b"1\n");
    let other = guest.exec(&[
        ("id", Value::Str("b")),
        ("rid", Value::Str("r2")),
        ("shell", Value::Bin(text.as_bytes())),
    ]);
    assert_eq!(other.out, b"2\n");
    std::fs::remove_file(file).unwrap();
}

#[test]
fn signals_wait_and_ps() {
    let mut guest = Guest::start();
    let start = guest.open(
        &[
            ("m", Value::Str("exec")),
            ("id", Value::Str("s")),
            ("argv", words(&["sleep", "50"])),
            ("start", Value::Bool(true)),
        ],
        true,
    );
    let got = guest.next_frame(start);
    let pid = Value::decode(&got.payload)
        .unwrap()
        .get("pid")
        .and_then(Value::as_i64)
        .unwrap();
    assert!(pid > 0);
    let wait = guest.open(
        &[
            ("m", Value::Str("wait")),
            ("id", Value::Str("s")),
            ("timeout_ms", Value::UInt(50)),
        ],
        true,
    );
    let running = guest.collect(wait).raw;
    assert_eq!(
        Value::decode(&running).unwrap().get("running"),
        Some(&Value::Bool(true))
    );
    let wait = guest.open(&[("m", Value::Str("wait")), ("id", Value::Str("s"))], true);
    let signal = guest.open(
        &[
            ("m", Value::Str("signal")),
            ("pid", Value::UInt(pid as u64)),
            ("sig", Value::UInt(15)),
        ],
        true,
    );
    assert!(guest.collect(signal).error.is_none());
    let done = guest.collect(wait);
    assert_eq!((done.signal, done.reason.as_str()), (Some(15), "signal"));
    let ps = guest.open(&[("m", Value::Str("ps"))], true);
    let raw = guest.collect(ps).raw;
    let list = Value::decode(&raw).unwrap();
    let entry = &list.get("processes").unwrap().as_array().unwrap()[0];
    assert_eq!(entry.get("state").and_then(Value::as_str), Some("ended"));
    let gone = guest.open(
        &[
            ("m", Value::Str("signal")),
            ("id", Value::Str("s")),
            ("sig", Value::UInt(15)),
        ],
        true,
    );
    assert_eq!(guest.collect(gone).error.as_deref(), Some("no_process"));
}

#[test]
fn a_new_epoch_forgets_streams_and_keeps_processes() {
    let mut guest = Guest::start();
    let text = b"sleep 0.4; echo late";
    let exec = [
        ("m", Value::Str("exec")),
        ("id", Value::Str("e")),
        ("rid", Value::Str("r")),
        ("shell", Value::Bin(text)),
    ];
    guest.open(&exec, false);
    let mut hello = dsec_wire::Encoder::new();
    hello.map(2).str("proto").uint(1).str("epoch").uint(2);
    guest.send(0, frame::HELLO, &hello.out);
    let answer = guest.next_frame(0);
    assert_eq!(
        Value::decode(&answer.payload).unwrap().get("epoch"),
        Some(&Value::UInt(2))
    );
    let wait = guest.open(&exec, false);
    assert_eq!(guest.collect(wait).out, b"late\n");
}

#[test]
fn reset_of_an_exec_kills_it_and_hostile_frames_are_ignored() {
    let mut guest = Guest::start();
    let exec = guest.open(
        &[
            ("m", Value::Str("exec")),
            ("id", Value::Str("e")),
            ("argv", words(&["sleep", "50"])),
        ],
        false,
    );
    guest.raw_send(b"\xff\xff\xff\xff garbage");
    guest.raw_send(b"ab");
    guest.send(9999, frame::DATA, b"nobody");
    guest.send(1, frame::OPEN, b"\x80");
    guest.send(exec, frame::RESET, b"\x80");
    let wait = guest.open(&[("m", Value::Str("wait")), ("id", Value::Str("e"))], true);
    let done = guest.collect(wait);
    assert_eq!(done.reason, "killed");
}

#[test]
fn the_guest_ends_with_its_channel() {
    let (mut child, hello) = {
        let mut guest = Guest::start();
        let child = std::mem::replace(
            &mut guest.child,
            std::process::Command::new("true").spawn().unwrap(),
        );
        (child, guest.hello.clone())
    };
    assert!(!hello.is_empty());
    support::wait_for("the guest's exit", || child.try_wait().unwrap().is_some());
}

#[test]
fn environment_users_and_descriptors() {
    let mut guest = Guest::start();
    let env = Value::Map(vec![
        (Value::Str("V"), Value::Str(" a\n$b\t")),
        (Value::Str("HOME"), Value::Str("/x")),
    ]);
    let done = guest.exec(&[("argv", words(&["env", "-0"])), ("env", env)]);
    let vars: Vec<&[u8]> = done.out.split(|b| *b == 0).collect();
    for expected in ["V= a\n$b\t", "HOME=/x", "USER=root", "LOGNAME=root"] {
        assert!(
            vars.contains(&expected.as_bytes()),
            "{expected:?} is missing in {}",
            String::from_utf8_lossy(&done.out)
        );
    }
    assert_eq!(
        guest.shell("ls /proc/self/fd").out,
        b"0\n1\n2\n3\n",
        "3 is ls's own"
    );
    assert_eq!(
        guest
            .exec(&[
                ("argv", words(&["id", "-u"])),
                ("user", Value::Str("12345"))
            ])
            .out,
        b"12345\n"
    );
    assert_eq!(
        guest
            .exec(&[("argv", words(&["pwd"])), ("cwd", Value::Bin(b"/usr"))])
            .out,
        b"/usr\n"
    );
    assert_eq!(
        guest
            .shell("umask; grep SigIgn /proc/self/status; grep SigBlk /proc/self/status")
            .out,
        b"0022\nSigIgn:\t0000000000000000\nSigBlk:\t0000000000000000\n"
    );
    assert_eq!(
        guest.shell("grep CapBnd /proc/self/status").out,
        b"CapBnd:\t00000000a80425fb\n"
    );
}

#[test]
fn a_start_whose_stdin_ends_at_once_still_tells_its_pid() {
    let mut guest = Guest::start();
    let request = [
        ("m", Value::Str("exec")),
        ("id", Value::Str("c")),
        ("argv", words(&["cat"])),
        ("stdin", Value::Bool(true)),
        ("start", Value::Bool(true)),
    ];
    let stream = guest.open(&request, true);
    let got = guest.next_frame(stream);
    assert!(
        got.fin && Value::decode(&got.payload).unwrap().get("pid").is_some(),
        "{got:?}"
    );
    let wait = guest.open(&[("m", Value::Str("wait")), ("id", Value::Str("c"))], true);
    assert_eq!(guest.collect(wait).exit, Some(0));
    let late = guest.open(
        &[("m", Value::Str("stdin")), ("id", Value::Str("c"))],
        false,
    );
    assert_eq!(guest.collect(late).error.as_deref(), Some("bad_state"));
}

#[test]
fn a_stdin_stream_resumes_by_offset() {
    let mut guest = Guest::start();
    let request = [
        ("m", Value::Str("exec")),
        ("id", Value::Str("c")),
        ("argv", words(&["cat"])),
        ("stdin", Value::Bool(true)),
        ("start", Value::Bool(true)),
    ];
    let stream = guest.open(&request, false);
    assert!(!guest.next_frame(stream).fin);
    guest.send(stream, frame::DATA, b"0123456789");
    assert_eq!(guest.next_frame(stream).kind, frame::CREDIT);
    guest.send(stream, frame::RESET, b"\x80");
    let beyond = guest.open(
        &[
            ("m", Value::Str("stdin")),
            ("id", Value::Str("c")),
            ("offset", Value::UInt(11)),
        ],
        false,
    );
    assert_eq!(guest.collect(beyond).error.as_deref(), Some("bad_state"));
    let again = guest.open(
        &[
            ("m", Value::Str("stdin")),
            ("id", Value::Str("c")),
            ("offset", Value::UInt(5)),
        ],
        false,
    );
    guest.send(again, frame::DATA | frame::FIN, b"56789abc");
    let raw = guest.collect(again).raw;
    assert_eq!(
        Value::decode(&raw).unwrap().get("written"),
        Some(&Value::UInt(8))
    );
    let output = guest.open(
        &[
            ("m", Value::Str("output")),
            ("id", Value::Str("c")),
            ("follow", Value::Bool(true)),
        ],
        true,
    );
    assert_eq!(guest.collect(output).out, b"0123456789abc");
}

#[test]
fn endless_output_costs_bounded_memory_and_others_go_on() {
    let mut guest = Guest::start();
    let yes = [
        ("m", Value::Str("exec")),
        ("id", Value::Str("y")),
        ("argv", words(&["yes"])),
        ("start", Value::Bool(true)),
    ];
    let stream = guest.open(&yes, true);
    assert!(guest.next_frame(stream).fin);
    let until = std::time::Instant::now() + std::time::Duration::from_secs(2);
    while std::time::Instant::now() < until {
        assert_eq!(guest.shell("echo on").out, b"on\n");
    }
    let peak = guest.status_kib("VmHWM");
    let output = guest.open(
        &[("m", Value::Str("output")), ("id", Value::Str("y"))],
        true,
    );
    let got = guest.collect(output);
    assert!(got.out.len() > 10_000_000 && got.out.iter().all(|b| matches!(b, b'y' | b'\n')));
    // 10 MiB are kept; while the tail grows it is held twice for a moment only if it must move.
    assert!(peak < 13 << 10, "{peak} KiB");
}

#[test]
fn scripts_and_broken_interpreters() {
    use std::os::unix::fs::PermissionsExt;
    let mut guest = Guest::start();
    let path = std::env::temp_dir().join(format!("dsec-script-{}", std::process::id()));
    let text = path.to_str().unwrap();
    let mut run = |content: &str, mode: u32| {
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        guest.exec(&[("argv", words(&[text, "arg"]))])
    };
    assert_eq!(run("echo plain $1\n", 0o755).out, b"plain arg\n");
    assert_eq!(
        run("#!/no/interpreter\n", 0o755).error.as_deref(),
        Some("exec_failed")
    );
    assert_eq!(
        run("#!/bin/sh\n", 0o644).error.as_deref(),
        Some("permission")
    );
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn random_requests_do_not_hurt() {
    let mut guest = Guest::start();
    let mut seed = 42u64;
    let mut next = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    let keys = [
        "m",
        "id",
        "op",
        "path",
        "argv",
        "env",
        "cap",
        "sig",
        "pid",
        "offset",
        "since_out",
        "follow",
        "timeout_ms",
        "tree",
    ];
    let methods = [
        "exec", "output", "stdin", "signal", "wait", "ps", "usage", "file", "config", "x",
    ];
    for n in 0..3000u32 {
        let mut request = vec![("m", Value::Str(methods[next() as usize % methods.len()]))];
        for _ in 0..next() % 5 {
            let value = match next() % 7 {
                0 => Value::Nil,
                1 => Value::UInt(next() >> (next() % 64)),
                2 => Value::Int(-1),
                3 => Value::Bin(b"\xff\x00"),
                4 => Value::Array(vec![Value::Array(vec![]); 3]),
                5 => Value::Map(vec![(Value::Nil, Value::Nil)]),
                _ => Value::Str("/nothing"),
            };
            request.push((keys[next() as usize % keys.len()], value));
        }
        let stream = guest.open(&request, next() % 2 == 0);
        if next() % 3 == 0 {
            guest.send(
                stream,
                [
                    frame::DATA,
                    frame::RESET,
                    frame::CREDIT,
                    frame::MSG | frame::FIN,
                ][next() as usize % 4],
                &n.to_le_bytes(),
            );
        }
        while guest
            .frame_within(stream, std::time::Duration::ZERO)
            .is_some()
        {}
    }
    assert_eq!(guest.shell("echo alive").out, b"alive\n");
}
