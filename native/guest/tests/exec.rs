//! Commands through the real binary, without namespaces.

mod support;
use dsec_wire::{frame, Value};
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
    let before = guest.status_kib("VmRSS");
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
