//! Operations on single files.

use super::path::{failed, Root};
use super::port::Port;
use super::request::FileRequest;
use crate::process::child::lookup;
use crate::reply::{Failure, Outcome};
use crate::sys::consts::*;
use crate::sys::{fs, io, Errno};
use alloc::vec::Vec;
use dsec_wire::frame::MAX_PAYLOAD;
use dsec_wire::Encoder;

/// An empty map.
pub fn done() -> Vec<u8> {
    Vec::from([0x80])
}

pub fn sized(size: u64) -> Vec<u8> {
    let mut e = Encoder::new();
    e.map(1).str("size").uint(size);
    e.out
}

/// The error for an open file that is not regular.
pub fn not_regular(stat: &fs::Stat, path: &[u8]) -> Failure {
    if stat.is_dir() {
        failed("use as a file", path)(Errno::EISDIR)
    } else {
        Failure::new("not_regular", "it is not a regular file").at(path)
    }
}

pub fn read(port: &Port, root: &Root, request: &FileRequest) -> Outcome<Vec<u8>> {
    let wrap = failed("read", &request.path);
    let file = root
        .open_path(&request.path, O_RDONLY | O_NONBLOCK | O_NOCTTY, 0)
        .map_err(&wrap)?;
    let stat = fs::fstat(file.raw()).map_err(&wrap)?;
    if !stat.is_regular() {
        return Err(not_regular(&stat, &request.path));
    }
    let mut left = request.limit.unwrap_or(u64::MAX);
    let (mut at, mut sent) = (request.offset, 0u64);
    let mut buf = alloc::vec![0u8; MAX_PAYLOAD.min(stat.size.max(4096) as usize + 1)];
    while left > 0 {
        let n = (buf.len() as u64).min(left) as usize;
        match io::pread(file.raw(), &mut buf[..n], at) {
            // Files such as trace pipes have nothing now and would wait: that is their end for us.
            Ok(0) | Err(Errno::EAGAIN) => break,
            Ok(n) => {
                port.send_data(&buf[..n]);
                at += n as u64;
                sent += n as u64;
                left -= n as u64;
            }
            Err(Errno::EINTR) => {}
            Err(error) => return Err(wrap(error)),
        }
    }
    Ok(sized(sent))
}

fn type_name(kind: u32) -> &'static str {
    match kind {
        S_IFREG => "file",
        S_IFDIR => "directory",
        S_IFLNK => "symlink",
        S_IFIFO => "fifo",
        S_IFSOCK => "socket",
        S_IFCHR => "char",
        _ => "block",
    }
}

/// Appends one entry, as `stat` and `list` answer it.
pub fn put_entry(
    e: &mut Encoder,
    name: &[u8],
    path: &[u8],
    stat: &fs::Stat,
    target: Option<&[u8]>,
) {
    e.map(9)
        .str("name")
        .bin(name)
        .str("path")
        .bin(path)
        .str("type")
        .str(type_name(stat.kind()));
    e.str("size")
        .uint(stat.size)
        .str("mode")
        .uint(u64::from(stat.mode & 0o7777));
    e.str("uid")
        .uint(u64::from(stat.uid))
        .str("gid")
        .uint(u64::from(stat.gid));
    e.str("mtime_ns").int(stat.mtime_ns).str("target");
    match target {
        Some(target) => e.bin(target),
        None => e.nil(),
    };
}

pub fn stat(root: &Root, request: &FileRequest) -> Outcome<Vec<u8>> {
    let wrap = failed("look at", &request.path);
    let follow = request.follow.unwrap_or(false);
    let flags = O_PATH | if follow { 0 } else { O_NOFOLLOW };
    let file = root.open_path(&request.path, flags, 0).map_err(&wrap)?;
    let stat = fs::fstat(file.raw()).map_err(&wrap)?;
    let target = if stat.kind() == S_IFLNK {
        fs::readlinkat(file.raw(), c"").ok()
    } else {
        None
    };
    let mut e = Encoder::new();
    let (_, leaf) = super::path::split(&request.path);
    let name = if leaf.is_empty() { b"/".to_vec() } else { leaf };
    put_entry(&mut e, &name, &request.path, &stat, target.as_deref());
    Ok(e.out)
}

pub fn mkdir(root: &Root, request: &FileRequest) -> Outcome<Vec<u8>> {
    let wrap = failed("make the directory", &request.path);
    let mode = request.mode.unwrap_or(0o755);
    if request.parents.unwrap_or(false) {
        let there = root.open_dir(&request.path).is_ok();
        root.make_dirs(&request.path, mode).map_err(&wrap)?;
        if there {
            return Ok(done());
        }
    } else {
        let place = root.place(&request.path, false).map_err(&wrap)?;
        fs::mkdirat(place.dir.raw(), &place.leaf, mode).map_err(&wrap)?;
    }
    // The umask does not apply to a mode that was asked for.
    if let (Some(mode), Ok(place)) = (request.mode, root.place(&request.path, false)) {
        fs::fchmodat(place.dir.raw(), &place.leaf, mode).map_err(&wrap)?;
    }
    Ok(done())
}

pub fn rename(root: &Root, request: &FileRequest) -> Outcome<Vec<u8>> {
    let to = request
        .to
        .as_deref()
        .filter(|to| !to.is_empty())
        .ok_or_else(|| Failure::new("invalid", "move needs `to`"))?;
    let from = root
        .place(&request.path, false)
        .map_err(failed("move", &request.path))?;
    let place = root.place(to, false).map_err(failed("move to", to))?;
    let flags = if request.overwrite {
        0
    } else {
        RENAME_NOREPLACE
    };
    match fs::renameat(
        from.dir.raw(),
        &from.leaf,
        place.dir.raw(),
        &place.leaf,
        flags,
    ) {
        Ok(()) => Ok(done()),
        Err(Errno::EXDEV) => super::write::move_across(&from, &place, request, to),
        Err(error @ (Errno::EEXIST | Errno::ENOTEMPTY | Errno::EISDIR)) => {
            Err(failed("move to", to)(error))
        }
        Err(error) => Err(failed("move", &request.path)(error)),
    }
}

pub fn chmod(root: &Root, request: &FileRequest) -> Outcome<Vec<u8>> {
    let wrap = failed("change the mode of", &request.path);
    let mode = request
        .mode
        .ok_or_else(|| Failure::new("invalid", "chmod needs a mode"))?;
    // A directory named `/` or `x/..` has no place, but can be opened.
    match root.final_place(&request.path, false) {
        Ok(place) => fs::fchmodat(place.dir.raw(), &place.leaf, mode).map_err(&wrap)?,
        Err(Errno::EINVAL) => {
            let dir = root
                .open_path(&request.path, O_RDONLY | O_DIRECTORY, 0)
                .map_err(&wrap)?;
            fs::fchmod(dir.raw(), mode).map_err(&wrap)?;
        }
        Err(error) => return Err(wrap(error)),
    }
    Ok(done())
}

pub fn chown(root: &Root, request: &FileRequest) -> Outcome<Vec<u8>> {
    let wrap = failed("change the owner of", &request.path);
    let owner = request
        .owner
        .as_deref()
        .ok_or_else(|| Failure::new("invalid", "chown needs an owner"))?;
    let who = lookup(owner).map_err(|text| Failure::new("not_found", text))?;
    let flags = O_PATH
        | if request.follow.unwrap_or(true) {
            0
        } else {
            O_NOFOLLOW
        };
    let file = root.open_path(&request.path, flags, 0).map_err(&wrap)?;
    fs::fchownat(file.raw(), c"", who.uid, who.gid, AT_EMPTY_PATH).map_err(&wrap)?;
    Ok(done())
}
