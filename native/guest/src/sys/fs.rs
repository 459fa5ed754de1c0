//! The file system, always relative to a directory descriptor.

use super::consts::*;
use super::{call, nr, Fd, Result};
use alloc::vec::Vec;
use core::ffi::CStr;

pub fn openat(dir: i32, path: &CStr, flags: u32, mode: u32) -> Result<Fd> {
    call!(
        nr::OPENAT,
        dir as isize,
        path.as_ptr(),
        flags | O_CLOEXEC,
        mode
    )
    .map(|fd| Fd::own(fd as i32))
}

pub fn openat2(dir: i32, path: &CStr, flags: u32, mode: u32, resolve: u64) -> Result<Fd> {
    let mode = if flags & O_CREAT != 0 {
        u64::from(mode)
    } else {
        0
    };
    let how = [u64::from(flags | O_CLOEXEC), mode, resolve];
    loop {
        // The kernel says EAGAIN when a rename raced with a ".." under RESOLVE_IN_ROOT.
        match call!(nr::OPENAT2, dir as isize, path.as_ptr(), how.as_ptr(), 24) {
            Err(super::Errno::EAGAIN)
                if resolve & (RESOLVE_IN_ROOT | RESOLVE_BENEATH) != 0
                    && flags & O_NONBLOCK == 0 => {}
            other => return other.map(|fd| Fd::own(fd as i32)),
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
struct RawStatx {
    mask: u32,
    blksize: u32,
    attributes: u64,
    nlink: u32,
    uid: u32,
    gid: u32,
    mode: u16,
    spare0: u16,
    ino: u64,
    size: u64,
    blocks: u64,
    attributes_mask: u64,
    times: [[u64; 2]; 4],
    rdev_major: u32,
    rdev_minor: u32,
    dev_major: u32,
    dev_minor: u32,
    rest: [u64; 14],
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Stat {
    pub mode: u32,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    pub ino: u64,
    pub dev: (u32, u32),
    pub size: u64,
    /// 512-byte units really allocated.
    pub blocks: u64,
    pub mtime_ns: i64,
}

impl Stat {
    pub fn kind(&self) -> u32 {
        self.mode & S_IFMT
    }

    pub fn is_dir(&self) -> bool {
        self.kind() == S_IFDIR
    }

    pub fn is_regular(&self) -> bool {
        self.kind() == S_IFREG
    }
}

/// Status of `path` below `dir`; an empty path with AT_EMPTY_PATH is `dir` itself.
pub fn statat(dir: i32, path: &CStr, flags: u32) -> Result<Stat> {
    const BASIC: u32 = 0x7ff;
    let mut raw = RawStatx::default();
    call!(
        nr::STATX,
        dir as isize,
        path.as_ptr(),
        flags,
        BASIC,
        &mut raw as *mut RawStatx
    )?;
    let [seconds, nanos] = raw.times[3];
    let nanos = i64::from(nanos as u32);
    Ok(Stat {
        mode: u32::from(raw.mode),
        nlink: raw.nlink,
        uid: raw.uid,
        gid: raw.gid,
        ino: raw.ino,
        dev: (raw.dev_major, raw.dev_minor),
        size: raw.size,
        blocks: raw.blocks,
        mtime_ns: (seconds as i64)
            .saturating_mul(1_000_000_000)
            .saturating_add(nanos),
    })
}

pub fn fstat(fd: i32) -> Result<Stat> {
    statat(fd, c"", AT_EMPTY_PATH)
}

pub fn mkdirat(dir: i32, path: &CStr, mode: u32) -> Result<()> {
    call!(nr::MKDIRAT, dir as isize, path.as_ptr(), mode).map(drop)
}

pub fn mkfifoat(dir: i32, path: &CStr, mode: u32) -> Result<()> {
    call!(nr::MKNODAT, dir as isize, path.as_ptr(), mode | S_IFIFO, 0).map(drop)
}

pub fn unlinkat(dir: i32, path: &CStr, flags: u32) -> Result<()> {
    call!(nr::UNLINKAT, dir as isize, path.as_ptr(), flags).map(drop)
}

pub fn renameat(from: i32, path: &CStr, to: i32, new: &CStr, flags: u32) -> Result<()> {
    call!(
        nr::RENAMEAT2,
        from as isize,
        path.as_ptr(),
        to as isize,
        new.as_ptr(),
        flags
    )
    .map(drop)
}

pub fn symlinkat(target: &CStr, dir: i32, path: &CStr) -> Result<()> {
    call!(nr::SYMLINKAT, target.as_ptr(), dir as isize, path.as_ptr()).map(drop)
}

pub fn linkat(from: i32, path: &CStr, to: i32, new: &CStr) -> Result<()> {
    call!(
        nr::LINKAT,
        from as isize,
        path.as_ptr(),
        to as isize,
        new.as_ptr(),
        0
    )
    .map(drop)
}

/// Gives an open file without a name one; works without privileges for its opener since Linux 6.10.
pub fn link_open_file(fd: i32, to: i32, new: &CStr) -> Result<()> {
    call!(
        nr::LINKAT,
        fd,
        c"".as_ptr(),
        to as isize,
        new.as_ptr(),
        AT_EMPTY_PATH
    )
    .map(drop)
}

pub fn readlinkat(dir: i32, path: &CStr) -> Result<Vec<u8>> {
    let mut buf = alloc::vec![0u8; 4096];
    let n = call!(
        nr::READLINKAT,
        dir as isize,
        path.as_ptr(),
        buf.as_mut_ptr(),
        buf.len()
    )?;
    buf.truncate(n);
    Ok(buf)
}

/// Changes the mode of `path` below `dir`, following a link.
pub fn fchmodat(dir: i32, path: &CStr, mode: u32) -> Result<()> {
    call!(nr::FCHMODAT, dir as isize, path.as_ptr(), mode).map(drop)
}

pub fn fchmod(fd: i32, mode: u32) -> Result<()> {
    call!(nr::FCHMOD, fd, mode).map(drop)
}

pub fn fchown(fd: i32, uid: u32, gid: u32) -> Result<()> {
    call!(nr::FCHOWN, fd, uid, gid).map(drop)
}

pub fn fchownat(dir: i32, path: &CStr, uid: u32, gid: u32, flags: u32) -> Result<()> {
    call!(nr::FCHOWNAT, dir as isize, path.as_ptr(), uid, gid, flags).map(drop)
}

/// Sets the modification time (and the access time to the same).
pub fn set_mtime(dir: i32, path: &CStr, mtime_ns: i64) -> Result<()> {
    let (s, ns) = (
        mtime_ns.div_euclid(1_000_000_000),
        mtime_ns.rem_euclid(1_000_000_000),
    );
    let times = [s, ns, s, ns];
    call!(
        nr::UTIMENSAT,
        dir as isize,
        path.as_ptr(),
        times.as_ptr(),
        AT_SYMLINK_NOFOLLOW
    )
    .map(drop)
}

/// Whether the effective user may write `path`; a link is followed.
pub fn may_write(dir: i32, path: &CStr) -> Result<()> {
    const W_OK: u32 = 2;
    call!(
        nr::FACCESSAT2,
        dir as isize,
        path.as_ptr(),
        W_OK,
        AT_EACCESS
    )
    .map(drop)
}

pub struct FsUsage {
    pub block_bytes: u64,
    pub blocks: u64,
    pub blocks_free: u64,
    pub inodes: u64,
    pub inodes_free: u64,
}

pub fn fs_usage(fd: i32) -> Result<FsUsage> {
    let mut raw = [0u64; 15];
    call!(nr::FSTATFS, fd, raw.as_mut_ptr())?;
    Ok(FsUsage {
        block_bytes: raw[1],
        blocks: raw[2],
        blocks_free: raw[3],
        inodes: raw[5],
        inodes_free: raw[6],
    })
}

/// Reads the next piece of a directory; empty at its end. Names are passed to `each` with their type.
pub fn read_dir_piece(fd: i32, buf: &mut [u8], mut each: impl FnMut(&[u8], u8)) -> Result<bool> {
    let n = call!(nr::GETDENTS64, fd, buf.as_mut_ptr(), buf.len())?;
    let mut at = 0;
    while at + 19 < n {
        let len = usize::from(u16::from_ne_bytes([buf[at + 16], buf[at + 17]]));
        let entry = &buf[at..(at + len).min(n)];
        let name = &entry[19..];
        let end = name.iter().position(|b| *b == 0).unwrap_or(name.len());
        if &name[..end] != b"." && &name[..end] != b".." {
            each(&name[..end], entry[18]);
        }
        if len == 0 {
            break;
        }
        at += len;
    }
    Ok(n > 0)
}
