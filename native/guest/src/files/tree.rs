//! Listing and removing trees of any depth.

use super::ops::{done, put_entry};
use super::path::{c_path, failed, split, Root};
use super::port::Port;
use super::request::FileRequest;
use crate::reply::Outcome;
use crate::sys::consts::*;
use crate::sys::{fs, io, Errno, Fd, Result};
use alloc::ffi::CString;
use alloc::vec::Vec;
use core::ffi::CStr;
use dsec_wire::{frame, Encoder};

/// Bytes of entries gathered before they are sent as one MSG.
const BATCH: usize = 40_000;
/// Directories held open at once while removing; deeper ones are moved up first.
const MAX_OPEN: usize = 100;

/// Opens a directory below `dir` without following any link.
pub fn open_dir_at(dir: i32, name: &[u8]) -> Result<Fd> {
    let flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK;
    fs::openat2(
        dir,
        &c_path(name)?,
        flags,
        0,
        RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS,
    )
}

/// All names in a directory.
pub fn names(dir: i32) -> Result<Vec<Vec<u8>>> {
    let mut out = Vec::new();
    let mut buf = alloc::vec![0u8; 32_768];
    // The descriptor may have been read before.
    io::lseek(dir, 0, SEEK_SET)?;
    while fs::read_dir_piece(dir, &mut buf, |name, _| out.push(name.to_vec()))? {}
    Ok(out)
}

/// Joins with exactly one slash.
pub fn join(base: &[u8], name: &[u8]) -> Vec<u8> {
    match base {
        b"" => name.to_vec(),
        _ if base.ends_with(b"/") => [base, name].concat(),
        _ => [base, b"/", name].concat(),
    }
}

struct Batch<'a> {
    port: &'a Port,
    entries: Encoder,
    in_batch: usize,
    count: u64,
}

impl Batch<'_> {
    fn flush(&mut self) {
        if self.in_batch > 0 {
            let mut e = Encoder::new();
            e.map(1).str("entries").array(self.in_batch);
            e.out.append(&mut self.entries.out);
            self.port.send(frame::MSG, &e.out);
            self.in_batch = 0;
        }
    }

    fn add(&mut self, name: &[u8], path: &[u8], stat: &fs::Stat, target: Option<&[u8]>) {
        put_entry(&mut self.entries, name, path, stat, target);
        self.in_batch += 1;
        self.count += 1;
        if self.entries.out.len() >= BATCH {
            self.flush();
        }
    }
}

pub fn list(port: &mut Port, root: &Root, request: &FileRequest) -> Outcome<Vec<u8>> {
    let wrap = failed("list", &request.path);
    let base = root
        .open_path(&request.path, O_RDONLY | O_DIRECTORY, 0)
        .map_err(&wrap)?;
    let mut batch = Batch {
        port,
        entries: Encoder::new(),
        in_batch: 0,
        count: 0,
    };
    let mut todo: Vec<(Vec<u8>, u64)> = Vec::from([(Vec::new(), 1)]);
    while let Some((below, depth)) = todo.pop() {
        let opened;
        let dir = if below.is_empty() {
            base.raw()
        } else {
            match open_dir_at(base.raw(), &below) {
                Ok(fd) => {
                    opened = fd;
                    opened.raw()
                }
                // Gone or unreadable since: its own entry is in the list already.
                Err(Errno::ENOENT | Errno::EACCES | Errno::ENOTDIR | Errno::ELOOP) => continue,
                Err(error) => return Err(failed("list", &below)(error)),
            }
        };
        let mut found = names(dir).map_err(&wrap)?;
        found.sort_unstable();
        let mut subdirs = Vec::new();
        for name in found {
            let Ok(c_name) = c_path(&name) else { continue };
            let Ok(stat) = fs::statat(dir, &c_name, AT_SYMLINK_NOFOLLOW) else {
                continue;
            };
            let target = if stat.kind() == S_IFLNK {
                fs::readlinkat(dir, &c_name).ok()
            } else {
                None
            };
            let rel = join(&below, &name);
            batch.add(&name, &join(&request.path, &rel), &stat, target.as_deref());
            if stat.is_dir() && depth < request.depth {
                subdirs.push((rel, depth + 1));
            }
        }
        todo.extend(subdirs.into_iter().rev());
    }
    batch.flush();
    let mut e = Encoder::new();
    e.map(1).str("count").uint(batch.count);
    Ok(e.out)
}

pub fn remove(root: &Root, request: &FileRequest) -> Outcome<Vec<u8>> {
    let wrap = failed("remove", &request.path);
    let (_, leaf) = split(&request.path);
    if leaf.is_empty() {
        return Err(wrap(Errno::EINVAL));
    }
    let place = root.place(&request.path, false).map_err(&wrap)?;
    let stat = fs::statat(place.dir.raw(), &place.leaf, AT_SYMLINK_NOFOLLOW).map_err(&wrap)?;
    if !stat.is_dir() {
        fs::unlinkat(place.dir.raw(), &place.leaf, 0).map_err(&wrap)?;
    } else if request.recursive {
        remove_tree(place.dir.raw(), &place.leaf).map_err(&wrap)?;
    } else {
        fs::unlinkat(place.dir.raw(), &place.leaf, AT_REMOVEDIR).map_err(&wrap)?;
    }
    Ok(done())
}

/// Removes the directory `name` in `dir` with all that is below it.
pub fn remove_tree(dir: i32, name: &CStr) -> Result<()> {
    let top = open_dir_at(dir, name.to_bytes())?;
    loop {
        let moved = empty_dir(&top, &top, 0)?;
        if moved == 0 {
            break;
        }
    }
    drop(top);
    fs::unlinkat(dir, name, AT_REMOVEDIR)
}

/// Removes what is in `dir`. What lies too deep is moved to `top` and counted, to be removed from there.
fn empty_dir(dir: &Fd, top: &Fd, depth: usize) -> Result<usize> {
    let mut moved = 0;
    for name in names(dir.raw())? {
        let name = c_path(&name)?;
        match fs::unlinkat(dir.raw(), &name, 0) {
            Ok(()) | Err(Errno::ENOENT) => continue,
            Err(Errno::EISDIR | Errno::EPERM) => {}
            Err(error) => return Err(error),
        }
        if depth >= MAX_OPEN {
            move_up(dir, &name, top)?;
            moved += 1;
            continue;
        }
        let sub = match open_dir_at(dir.raw(), name.to_bytes()) {
            // Not a directory after all: the first refusal was about the file.
            Err(Errno::ENOTDIR) => return Err(Errno::EPERM),
            other => other?,
        };
        moved += empty_dir(&sub, top, depth + 1)?;
        drop(sub);
        fs::unlinkat(dir.raw(), &name, AT_REMOVEDIR)?;
    }
    Ok(moved)
}

fn move_up(dir: &Fd, name: &CStr, top: &Fd) -> Result<()> {
    let mut salt = [0u8; 8];
    io::random(&mut salt)?;
    let new = CString::new(alloc::format!(".dsec-{:016x}.rm", u64::from_ne_bytes(salt)))
        .map_err(|_| Errno::EINVAL)?;
    fs::renameat(dir.raw(), name, top.raw(), &new, RENAME_NOREPLACE)
}
