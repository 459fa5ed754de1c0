//! Writing a file: to a temporary name beside the target, then renamed over it.

use super::ops::{done, not_regular, sized};
use super::path::{failed, Place, Root};
use super::port::Port;
use super::request::FileRequest;
use crate::reply::{Failure, Outcome};
use crate::sys::consts::*;
use crate::sys::{fs, io, Errno, Fd, Result};
use alloc::ffi::CString;
use alloc::vec::Vec;
use core::ffi::CStr;

/// A file that is not at its place yet. It has no name where the file system can do that, so that a
/// killed worker leaves nothing; else a temporary name, removed again unless it is put in place.
pub struct Temporary<'a> {
    dir: &'a Fd,
    name: Option<CString>,
    pub file: Fd,
}

/// A name that nobody uses.
fn free_name() -> Result<CString> {
    let mut salt = [0u8; 8];
    io::random(&mut salt)?;
    CString::new(alloc::format!(
        ".dsec-{:016x}.tmp",
        u64::from_ne_bytes(salt)
    ))
    .map_err(|_| Errno::EINVAL)
}

impl<'a> Temporary<'a> {
    pub fn new(dir: &'a Fd) -> Result<Temporary<'a>> {
        match fs::openat(dir.raw(), c".", O_WRONLY | O_TMPFILE, 0o600) {
            Ok(file) => {
                return Ok(Temporary {
                    dir,
                    name: None,
                    file,
                })
            }
            Err(Errno::EOPNOTSUPP | Errno::EISDIR | Errno::ENOENT | Errno::EINVAL) => {}
            Err(error) => return Err(error),
        }
        loop {
            let name = free_name()?;
            match fs::openat(
                dir.raw(),
                &name,
                O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW,
                0o600,
            ) {
                Ok(file) => {
                    return Ok(Temporary {
                        dir,
                        name: Some(name),
                        file,
                    })
                }
                Err(Errno::EEXIST) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Gives the file its name, atomically; an existing file is replaced unless `flags` forbid it.
    pub fn place(mut self, leaf: &CStr, flags: u32) -> Result<()> {
        let dir = self.dir.raw();
        if self.name.is_none() {
            match fs::link_open_file(self.file.raw(), dir, leaf) {
                Err(Errno::EEXIST) if flags & RENAME_NOREPLACE == 0 => {}
                other => return other,
            }
            let name = free_name()?;
            fs::link_open_file(self.file.raw(), dir, &name)?;
            self.name = Some(name);
        }
        if let Some(name) = &self.name {
            fs::renameat(dir, name, dir, leaf, flags)?;
            self.name = None;
        }
        Ok(())
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            let _ = fs::unlinkat(self.dir.raw(), name, 0);
        }
    }
}

pub fn write_all(fd: i32, mut bytes: &[u8]) -> Result<()> {
    while !bytes.is_empty() {
        match io::write(fd, bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn copy_in(port: &mut Port, fd: i32) -> Result<u64> {
    let mut size = 0;
    while let Some(piece) = port.receive() {
        write_all(fd, piece)?;
        size += piece.len() as u64;
    }
    Ok(size)
}

pub fn write(port: &mut Port, root: &Root, request: &FileRequest) -> Outcome<Vec<u8>> {
    let wrap = failed("write", &request.path);
    if request.path.ends_with(b"/") {
        return Err(wrap(Errno::EISDIR));
    }
    let place = root
        .final_place(&request.path, request.parents.unwrap_or(true))
        .map_err(|error| match error {
            Errno::EINVAL => wrap(Errno::EISDIR),
            error => wrap(error),
        })?;
    let old = match fs::statat(place.dir.raw(), &place.leaf, AT_SYMLINK_NOFOLLOW) {
        Ok(stat) if !stat.is_regular() => return Err(not_regular(&stat, &request.path)),
        Ok(stat) => Some(stat),
        Err(Errno::ENOENT) => None,
        Err(error) => return Err(wrap(error)),
    };
    if old.is_some() {
        fs::may_write(place.dir.raw(), &place.leaf).map_err(&wrap)?;
    }
    if request.append {
        return append(port, &place, request).map(sized);
    }
    let temporary = Temporary::new(&place.dir).map_err(&wrap)?;
    let fd = temporary.file.raw();
    let size = copy_in(port, fd).map_err(&wrap)?;
    if let Some(old) = &old {
        // Only root can keep a foreign owner; for others the file becomes theirs. Before the mode,
        // because a change of owner clears the set-id bits.
        let _ = fs::fchown(fd, old.uid, old.gid);
    }
    let mode = request
        .mode
        .or(old.map(|old| old.mode & 0o7777))
        .unwrap_or(0o644);
    fs::fchmod(fd, mode).map_err(&wrap)?;
    temporary.place(&place.leaf, 0).map_err(&wrap)?;
    Ok(sized(size))
}

fn append(port: &mut Port, place: &Place, request: &FileRequest) -> Outcome<u64> {
    let wrap = failed("append to", &request.path);
    let flags = O_WRONLY | O_APPEND | O_CREAT | O_NONBLOCK | O_NOCTTY | O_NOFOLLOW;
    let file = fs::openat(
        place.dir.raw(),
        &place.leaf,
        flags,
        request.mode.unwrap_or(0o644),
    )
    .map_err(&wrap)?;
    let stat = fs::fstat(file.raw()).map_err(&wrap)?;
    if !stat.is_regular() {
        return Err(not_regular(&stat, &request.path));
    }
    copy_in(port, file.raw()).map_err(&wrap)
}

/// Moves between file systems: regular files and links are copied and the old name removed.
pub fn move_across(
    from: &Place,
    to: &Place,
    request: &FileRequest,
    to_path: &[u8],
) -> Outcome<Vec<u8>> {
    let wrap = failed("move", &request.path);
    let stat = fs::statat(from.dir.raw(), &from.leaf, AT_SYMLINK_NOFOLLOW).map_err(&wrap)?;
    let flags = if request.overwrite {
        0
    } else {
        RENAME_NOREPLACE
    };
    if !stat.is_regular() {
        let text = "it would cross file systems or layers, which only regular files can; copy it with a command such as mv";
        return Err(Failure::new("unsupported", text).at(&request.path));
    }
    let source = fs::openat(
        from.dir.raw(),
        &from.leaf,
        O_RDONLY | O_NONBLOCK | O_NOFOLLOW,
        0,
    )
    .map_err(&wrap)?;
    let temporary = Temporary::new(&to.dir).map_err(failed("move to", to_path))?;
    let mut buf = alloc::vec![0u8; 65_536];
    loop {
        match io::read(source.raw(), &mut buf) {
            Ok(0) => break,
            Ok(n) => {
                write_all(temporary.file.raw(), &buf[..n]).map_err(failed("move to", to_path))?
            }
            Err(Errno::EINTR) => {}
            Err(error) => return Err(wrap(error)),
        }
    }
    let _ = fs::fchown(temporary.file.raw(), stat.uid, stat.gid);
    fs::fchmod(temporary.file.raw(), stat.mode & 0o7777).map_err(&wrap)?;
    temporary
        .place(&to.leaf, flags)
        .map_err(failed("move to", to_path))?;
    fs::unlinkat(from.dir.raw(), &from.leaf, 0).map_err(&wrap)?;
    Ok(done())
}
