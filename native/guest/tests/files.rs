//! File operations through the real binary, in a directory of the host.

mod support;
use dsec_wire::{frame, Value};
use std::fs;
use std::os::unix::fs::{symlink, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{Done, Guest};

struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        let path = std::env::temp_dir().join(format!("dsec-files-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Dir(path)
    }

    fn at(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().into()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = Command::new("rm").arg("-rf").arg(&self.0).status();
    }
}

fn file<'a>(
    op: &'a str,
    path: &'a str,
    more: &[(&'a str, Value<'a>)],
) -> Vec<(&'a str, Value<'a>)> {
    let mut all = vec![
        ("m", Value::Str("file")),
        ("op", Value::Str(op)),
        ("path", Value::Bin(path.as_bytes())),
    ];
    all.extend(more.iter().cloned());
    all
}

/// Runs an operation whose data (if any) is sent by the guest.
fn get(guest: &mut Guest, op: &str, path: &str, more: &[(&str, Value<'_>)]) -> (Vec<u8>, Done) {
    let stream = guest.open(&file(op, path, more), true);
    let mut data = Vec::new();
    loop {
        let got = guest.next_frame(stream);
        match got.kind {
            frame::DATA => {
                data.extend_from_slice(&got.payload);
                guest.send(
                    stream,
                    frame::CREDIT,
                    &(got.payload.len() as u32).to_le_bytes(),
                );
            }
            frame::MSG if !got.fin => data.extend_from_slice(&got.payload),
            _ => {
                let map = Value::decode(&got.payload).unwrap();
                let error = (got.kind == frame::RESET)
                    .then(|| map.get("code").unwrap().as_str().unwrap().to_string());
                drop(map);
                return (
                    data,
                    Done {
                        error,
                        raw: got.payload,
                        ..Done::default()
                    },
                );
            }
        }
    }
}

/// Runs an operation that we send data to.
fn put(guest: &mut Guest, op: &str, path: &str, data: &[u8], more: &[(&str, Value<'_>)]) -> Done {
    let stream = guest.open(&file(op, path, more), false);
    let (mut window, mut at, mut fin) = (frame::WINDOW as usize, 0, false);
    loop {
        while window > 0 && at < data.len() {
            let n = window.min(frame::MAX_PAYLOAD).min(data.len() - at);
            guest.send(stream, frame::DATA, &data[at..at + n]);
            at += n;
            window -= n;
        }
        if at == data.len() && !fin {
            guest.send(stream, frame::DATA | frame::FIN, b"");
            fin = true;
        }
        let got = guest.next_frame(stream);
        match got.kind {
            frame::CREDIT => {
                window += u32::from_le_bytes(got.payload.as_slice().try_into().unwrap()) as usize
            }
            frame::MSG if got.fin => {
                return Done {
                    raw: got.payload,
                    ..Done::default()
                }
            }
            frame::RESET => {
                let code = Value::decode(&got.payload)
                    .unwrap()
                    .get("code")
                    .unwrap()
                    .as_str()
                    .unwrap()
                    .to_string();
                return Done {
                    error: Some(code),
                    raw: got.payload,
                    ..Done::default()
                };
            }
            _ => panic!("{got:?}"),
        }
    }
}

fn noise(n: usize) -> Vec<u8> {
    (0..n as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 11) as u8)
        .collect()
}

fn code(done: &Done) -> &str {
    done.error.as_deref().unwrap_or("ok")
}

#[test]
fn write_and_read_all_sizes() {
    let (mut guest, dir) = (Guest::start(), Dir::new("sizes"));
    for size in [0, 1, 18_000, 65_535, 65_536, 65_537, 1 << 20, 20 << 20] {
        let data = noise(size);
        let path = dir.at("new/deep/f");
        assert_eq!(code(&put(&mut guest, "write", &path, &data, &[])), "ok");
        assert!(fs::read(&path).unwrap() == data);
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o7777,
            0o644
        );
        let (back, done) = get(&mut guest, "read", &path, &[]);
        assert!(back == data && code(&done) == "ok", "{size}");
    }
    let (part, _) = get(
        &mut guest,
        "read",
        &dir.at("new/deep/f"),
        &[("offset", Value::UInt(5)), ("limit", Value::UInt(70_000))],
    );
    assert!(part == noise(20 << 20)[5..70_005]);
    let odd = dir.at("x\n\u{1}' \"*");
    assert_eq!(code(&put(&mut guest, "write", &odd, b"odd", &[])), "ok");
    assert_eq!(get(&mut guest, "read", &odd, &[]).0, b"odd");
    assert_eq!(
        fs::read_dir(&dir.0).unwrap().count(),
        2,
        "temporary files are left"
    );
    let (proc_file, done) = get(&mut guest, "read", "/proc/self/status", &[]);
    assert!(proc_file.starts_with(b"Name:"), "{done:?}");
    let (empty, _) = get(&mut guest, "read", "/proc/uptime", &[]);
    assert!(!empty.is_empty());
}

#[test]
fn replacement_keeps_mode_and_owner_and_appends_in_place() {
    let (mut guest, dir) = (Guest::start(), Dir::new("replace"));
    let path = dir.at("f");
    fs::write(&path, "old").unwrap();
    std::os::unix::fs::chown(&path, Some(1234), Some(4321)).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o4751)).unwrap();
    symlink("f", dir.at("link")).unwrap();
    assert_eq!(
        code(&put(&mut guest, "write", &dir.at("link"), b"new", &[])),
        "ok"
    );
    let stat = fs::metadata(&path).unwrap();
    assert_eq!(
        (stat.mode() & 0o7777, stat.uid(), stat.gid()),
        (0o4751, 1234, 4321)
    );
    assert!(fs::symlink_metadata(dir.at("link")).unwrap().is_symlink());
    assert_eq!(
        code(&put(
            &mut guest,
            "write",
            &path,
            b"er",
            &[("append", Value::Bool(true))]
        )),
        "ok"
    );
    assert_eq!(fs::read(&path).unwrap(), b"newer");
    assert_eq!(
        code(&put(
            &mut guest,
            "write",
            &dir.at("g"),
            b"",
            &[("mode", Value::UInt(0o600))]
        )),
        "ok"
    );
    assert_eq!(fs::metadata(dir.at("g")).unwrap().mode() & 0o7777, 0o600);
}

#[test]
fn distinct_errors_and_no_hangs() {
    let (mut guest, dir) = (Guest::start(), Dir::new("errors"));
    let fifo = dir.at("fifo");
    assert!(Command::new("mkfifo")
        .arg(&fifo)
        .status()
        .unwrap()
        .success());
    fs::create_dir(dir.at("d")).unwrap();
    fs::write(dir.at("d/inner"), "x").unwrap();
    fs::write(dir.at("f"), "x").unwrap();
    symlink("loop", dir.at("loop")).unwrap();
    let none = dir.at("none");
    for (op, path, want) in [
        ("read", &none, "not_found"),
        ("read", &dir.at("d"), "is_directory"),
        ("read", &fifo, "not_regular"),
        ("read", &dir.at("f/x"), "not_directory"),
        ("read", &dir.at("loop"), "loop"),
        ("read", &dir.at(&"n".repeat(300)), "name_too_long"),
        ("stat", &none, "not_found"),
        ("list", &dir.at("f"), "not_directory"),
        ("mkdir", &dir.at("d"), "exists"),
        ("remove", &dir.at("d"), "not_empty"),
        ("remove", &none, "not_found"),
        ("tar_get", &none, "not_found"),
        ("sing", &none, "unsupported"),
    ] {
        assert_eq!(code(&get(&mut guest, op, path, &[]).1), want, "{op} {path}");
    }
    for (path, want) in [
        (&dir.at("d"), "is_directory"),
        (&fifo, "not_regular"),
        (&dir.at("f/x"), "not_directory"),
    ] {
        assert_eq!(
            code(&put(&mut guest, "write", path, b"x", &[])),
            want,
            "{path}"
        );
        assert_eq!(
            code(&put(
                &mut guest,
                "write",
                path,
                b"x",
                &[("append", Value::Bool(true))]
            )),
            want,
            "{path}"
        );
    }
    let user = ("user", Value::Str("4242"));
    assert_eq!(
        code(&put(
            &mut guest,
            "write",
            &dir.at("d/u"),
            b"x",
            std::slice::from_ref(&user)
        )),
        "permission"
    );
    assert_eq!(
        code(&get(&mut guest, "read", "/etc/shadow", &[user]).1),
        "permission"
    );
    assert_eq!(
        code(
            &get(
                &mut guest,
                "read",
                &dir.at("f"),
                &[("user", Value::Str("whoisthis"))]
            )
            .1
        ),
        "not_found"
    );
}

#[test]
fn a_full_file_system_keeps_the_old_file() {
    let (mut guest, dir) = (Guest::start(), Dir::new("full"));
    assert!(Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=1m,nr_inodes=20", "none"])
        .arg(&dir.0)
        .status()
        .unwrap()
        .success());
    let path = dir.at("f");
    assert_eq!(code(&put(&mut guest, "write", &path, b"old", &[])), "ok");
    let full = put(&mut guest, "write", &path, &noise(3 << 20), &[]);
    let (content, count) = (
        fs::read(&path).unwrap(),
        fs::read_dir(&dir.0).unwrap().count(),
    );
    assert!(Command::new("umount")
        .arg(&dir.0)
        .status()
        .unwrap()
        .success());
    assert_eq!(
        (code(&full), content.as_slice(), count),
        ("no_space", b"old".as_slice(), 1)
    );
}

#[test]
fn directories_moves_modes_and_owners() {
    let (mut guest, dir) = (Guest::start(), Dir::new("dirs"));
    assert_eq!(
        code(&get(&mut guest, "mkdir", &dir.at("a/b/c"), &[]).1),
        "not_found"
    );
    assert_eq!(
        code(
            &get(
                &mut guest,
                "mkdir",
                &dir.at("a/b/c"),
                &[("parents", Value::Bool(true)), ("mode", Value::UInt(0o770))]
            )
            .1
        ),
        "ok"
    );
    assert_eq!(
        fs::metadata(dir.at("a/b/c")).unwrap().mode() & 0o7777,
        0o770
    );
    fs::write(dir.at("a/b/f"), "12345").unwrap();
    symlink("f", dir.at("a/b/l")).unwrap();
    let (raw, done) = get(
        &mut guest,
        "list",
        &dir.at("a"),
        &[("depth", Value::UInt(5))],
    );
    let map = Value::decode(&raw).unwrap();
    let names: Vec<String> = map
        .get("entries")
        .unwrap()
        .as_array()
        .unwrap()
        .iter()
        .map(|e| String::from_utf8(e.get("path").unwrap().as_bytes().unwrap().to_vec()).unwrap())
        .collect();
    assert_eq!(names, ["a/b", "a/b/c", "a/b/f", "a/b/l"].map(|n| dir.at(n)));
    assert_eq!(
        Value::decode(&done.raw).unwrap().get("count"),
        Some(&Value::UInt(4))
    );
    let stat = get(&mut guest, "stat", &dir.at("a/b/l"), &[]).1.raw;
    let stat = Value::decode(&stat).unwrap();
    assert_eq!(
        (stat.get("type"), stat.get("target").unwrap().as_bytes()),
        (Some(&Value::Str("symlink")), Some(b"f".as_slice()))
    );
    let stat = get(
        &mut guest,
        "stat",
        &dir.at("a/b/l"),
        &[("follow", Value::Bool(true))],
    )
    .1
    .raw;
    assert_eq!(
        Value::decode(&stat).unwrap().get("size"),
        Some(&Value::UInt(5))
    );
    let to = dir.at("a/moved");
    assert_eq!(
        code(
            &get(
                &mut guest,
                "move",
                &dir.at("a/b/f"),
                &[("to", Value::Str(&to))]
            )
            .1
        ),
        "ok"
    );
    fs::write(dir.at("a/other"), "o").unwrap();
    assert_eq!(
        code(
            &get(
                &mut guest,
                "move",
                &dir.at("a/other"),
                &[("to", Value::Str(&to)), ("overwrite", Value::Bool(false))]
            )
            .1
        ),
        "exists"
    );
    let shm = format!("/dev/shm/dsec-move-{}", std::process::id());
    assert_eq!(
        code(&get(&mut guest, "move", &to, &[("to", Value::Str(&shm))]).1),
        "ok"
    );
    assert_eq!(fs::read(&shm).unwrap(), b"12345");
    fs::remove_file(&shm).unwrap();
    assert_eq!(
        code(
            &get(
                &mut guest,
                "chmod",
                &dir.at("a/other"),
                &[("mode", Value::UInt(0o604))]
            )
            .1
        ),
        "ok"
    );
    assert_eq!(
        code(
            &get(
                &mut guest,
                "chown",
                &dir.at("a/other"),
                &[("owner", Value::Str("77:88"))]
            )
            .1
        ),
        "ok"
    );
    let stat = fs::metadata(dir.at("a/other")).unwrap();
    assert_eq!(
        (stat.mode() & 0o7777, stat.uid(), stat.gid()),
        (0o604, 77, 88)
    );
    let script = format!(
        "cd {}; for i in $(seq 1 300); do mkdir d; touch d/f; cd d; done",
        dir.at("a")
    );
    assert_eq!(guest.shell(&script).exit, Some(0));
    assert_eq!(
        code(
            &get(
                &mut guest,
                "remove",
                &dir.at("a"),
                &[("recursive", Value::Bool(true))]
            )
            .1
        ),
        "ok"
    );
    assert!(!Path::new(&dir.at("a")).exists());
}

#[test]
fn trees_go_out_and_come_back() {
    let (mut guest, dir) = (Guest::start(), Dir::new("tar"));
    let long = "n".repeat(200);
    fs::create_dir_all(dir.at(&format!("src/{long}/sub"))).unwrap();
    fs::write(dir.at(&format!("src/{long}/sub/file")), noise(100_000)).unwrap();
    fs::write(dir.at("src/run.sh"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(dir.at("src/run.sh"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::hard_link(dir.at("src/run.sh"), dir.at("src/same")).unwrap();
    symlink("/etc/passwd", dir.at("src/link")).unwrap();
    assert!(Command::new("mkfifo")
        .arg(dir.at("src/fifo"))
        .status()
        .unwrap()
        .success());
    let socket = std::os::unix::net::UnixListener::bind(dir.at("src/sock")).unwrap();
    let sparse = fs::File::create(dir.at("src/sparse")).unwrap();
    std::os::unix::fs::FileExt::write_at(&sparse, b"data", 300_000).unwrap();
    sparse.set_len(50 << 20).unwrap();
    let (tar, done) = get(&mut guest, "tar_get", &dir.at("src"), &[]);
    drop(socket);
    let answer = Value::decode(&done.raw).unwrap();
    assert_eq!(
        answer.get("skipped").unwrap().as_array().unwrap(),
        [Value::Bin(b"sock")]
    );
    assert!(
        tar.len() < 1 << 20,
        "holes were not kept: {} bytes",
        tar.len()
    );
    // The system's tar agrees.
    fs::write(dir.at("t.tar"), &tar).unwrap();
    fs::create_dir(dir.at("by-tar")).unwrap();
    assert!(Command::new("tar")
        .args(["-xf", &dir.at("t.tar"), "-C", &dir.at("by-tar")])
        .status()
        .unwrap()
        .success());
    let put_done = put(&mut guest, "tar_put", &dir.at("made/by-us"), &tar, &[]);
    assert_eq!(code(&put_done), "ok");
    assert_eq!(
        Value::decode(&put_done.raw)
            .unwrap()
            .get("refused")
            .unwrap()
            .as_array()
            .unwrap()
            .len(),
        0
    );
    for copy in ["by-tar", "made/by-us"] {
        let at = |name: &str| dir.at(&format!("{copy}/{name}"));
        assert!(fs::read(at(&format!("{long}/sub/file"))).unwrap() == noise(100_000));
        assert_eq!(fs::metadata(at("run.sh")).unwrap().mode() & 0o7777, 0o755);
        assert_eq!(
            fs::metadata(at("run.sh")).unwrap().ino(),
            fs::metadata(at("same")).unwrap().ino()
        );
        assert_eq!(fs::read_link(at("link")).unwrap(), Path::new("/etc/passwd"));
        let sparse = fs::metadata(at("sparse")).unwrap();
        assert!(sparse.len() == 50 << 20 && sparse.blocks() < 1000, "{copy}");
        assert_eq!(&fs::read(at("sparse")).unwrap()[300_000..300_004], b"data");
        assert_eq!(
            fs::metadata(at("run.sh")).unwrap().mtime(),
            fs::metadata(dir.at("src/run.sh")).unwrap().mtime()
        );
    }
    let (one, _) = get(&mut guest, "tar_get", &dir.at("src/run.sh"), &[]);
    assert!(one.starts_with(b"run.sh\0"));
}

#[test]
fn gnu_tar_archives_and_hostile_ones() {
    let (mut guest, dir) = (Guest::start(), Dir::new("hostile"));
    let victim = dir.at("victim");
    fs::create_dir(&victim).unwrap();
    let script = format!(
        r#"
import tarfile, io, sys
t = tarfile.open({0:?}, "w", format=tarfile.GNU_FORMAT)
def add(name, data=b"x", **kw):
    i = tarfile.TarInfo(name)
    for k, v in kw.items(): setattr(i, k, v)
    if i.isreg(): i.size = len(data)
    t.addfile(i, io.BytesIO(data) if i.isreg() else None)
add("x", type=tarfile.SYMTYPE, linkname={1:?})
add("x/pwn"); add("../up"); add({1:?} + "/abs")
add("in", type=tarfile.SYMTYPE, linkname="sub"); add("sub/", type=tarfile.DIRTYPE, mode=0o500); add("in/ok2")
add("hard", type=tarfile.LNKTYPE, linkname="x/secret"); add("hard2", type=tarfile.LNKTYPE, linkname="../../etc/passwd")
add("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3)
add("L" * 180 + "/" + "M" * 150, b"long"); add("./ok", b"fine"); add("sub", b"over a directory")
t.close()
"#,
        dir.at("a.tar"),
        victim
    );
    assert!(Command::new("python3")
        .args(["-c", &script])
        .status()
        .unwrap()
        .success());
    fs::write(format!("{victim}/secret"), "s").unwrap();
    let done = put(
        &mut guest,
        "tar_put",
        &dir.at("t"),
        &fs::read(dir.at("a.tar")).unwrap(),
        &[("user", Value::Str("0"))],
    );
    assert_eq!(code(&done), "ok");
    let answer = Value::decode(&done.raw).unwrap();
    let refused: Vec<String> = answer
        .get("refused")
        .unwrap()
        .as_array()
        .unwrap()
        .iter()
        .map(|v| String::from_utf8_lossy(v.as_bytes().unwrap()).into_owned())
        .collect();
    assert_eq!(
        refused,
        [
            "x/pwn".into(),
            "../up".into(),
            format!("{victim}/abs"),
            "hard".into(),
            "hard2".into(),
            "null".into(),
            "sub".into()
        ] as [String; 7]
    );
    assert_eq!(fs::read_dir(&victim).unwrap().count(), 1);
    assert_eq!(fs::read(dir.at("t/ok")).unwrap(), b"fine");
    assert_eq!(fs::read(dir.at("t/sub/ok2")).unwrap(), b"x");
    assert_eq!(
        fs::metadata(dir.at("t/sub")).unwrap().mode() & 0o7777,
        0o500
    );
    assert_eq!(
        fs::read(dir.at(&format!("t/{}/{}", "L".repeat(180), "M".repeat(150)))).unwrap(),
        b"long"
    );
    let tar = fs::read(dir.at("a.tar")).unwrap();
    assert_eq!(
        code(&put(
            &mut guest,
            "tar_put",
            &dir.at("t2"),
            &noise(5000),
            &[]
        )),
        "invalid"
    );
    let cut = tar.iter().rposition(|b| *b == b'f').unwrap() + 1;
    assert_eq!(
        code(&put(&mut guest, "tar_put", &dir.at("t3"), &tar[..cut], &[])),
        "invalid"
    );
}

#[test]
fn a_reset_ends_the_worker_and_leaves_nothing() {
    let (mut guest, dir) = (Guest::start(), Dir::new("reset"));
    let path = dir.at("f");
    let stream = guest.open(&file("write", &path, &[]), false);
    guest.send(stream, frame::DATA, b"half");
    assert_eq!(guest.next_frame(stream).kind, frame::CREDIT);
    guest.send(stream, frame::RESET, b"\x80");
    assert_eq!(guest.shell("true").exit, Some(0));
    let pid = guest.child.id();
    support::wait_for("the worker's end", || {
        fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))
            .unwrap()
            .is_empty()
    });
    assert_eq!(fs::read_dir(&dir.0).unwrap().count(), 0);
    let slow = guest.open(&file("read", "/dev/shm", &[]), true);
    assert_eq!(guest.next_frame(slow).kind, frame::RESET);
}
