//! Descriptors of the host that outlive every sandbox: its namespaces, /proc, "/", and the prepared objects that sandboxes get
//! clones of. Also the reserved descriptor numbers.
//!
//! Workers live in an empty mount namespace, so host paths are reached through here only.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Error, Result};
use crate::spec::MAX_FDS;
use crate::sys::{self, FsContext};

/// Numbers per worker: the program, its named descriptors, and /dev/null.
pub const STAGE_WIDTH: i32 = 8;
/// Named descriptors of a program are 3, 4, ...; the program itself lies behind the last one.
pub const FIRST_FINAL: i32 = 3;
const FIRST_STAGE: i32 = 16;
const _: () = assert!(MAX_FDS as i32 + 2 <= STAGE_WIDTH);

/// First of the numbers reserved for worker `w`.
pub fn stage_base(worker: usize) -> i32 {
    FIRST_STAGE + STAGE_WIDTH * worker as i32
}

/// Moves the descriptors to keep out of the low numbers, closes all else, and fills the low numbers with /dev/null, so that a
/// child has to copy none but these. Must run before anything else opens a descriptor.
pub fn claim_numbers(workers: usize, keep: &[RawFd]) -> Result<Vec<OwnedFd>> {
    use std::os::fd::FromRawFd;
    let end = stage_base(workers);
    let mut kept = Vec::new();
    for fd in keep {
        // SAFETY: duplicates an inherited descriptor.
        match unsafe { libc::fcntl(*fd, libc::F_DUPFD_CLOEXEC, end) } {
            -1 => return Err(Error::last("dup", format!("inherited descriptor {fd}"))),
            // SAFETY: just made.
            new => kept.push(unsafe { OwnedFd::from_raw_fd(new) }),
        }
    }
    kept.sort_by_key(AsRawFd::as_raw_fd);
    let mut from = 3;
    for fd in &kept {
        close_between(from, fd.as_raw_fd() - 1);
        from = fd.as_raw_fd() + 1;
    }
    close_between(from, i32::MAX);
    let null = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/null");
    let null = null.map_err(|e| Error::os("open", "/dev/null", e))?;
    for number in 3..end {
        if number != null.as_raw_fd() {
            sys::dup_onto(null.as_raw_fd(), number)?;
        }
    }
    std::mem::forget(null);
    Ok(kept)
}

fn close_between(first: i32, last: i32) {
    if first <= last {
        // SAFETY: at start nothing in this process owns a descriptor in this range.
        unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    }
}

/// Entries of a cache; each may hold a descriptor.
const MAX_CACHED: usize = 64;

/// Values opened once by path and shared.
struct Cache<K, V>(Mutex<HashMap<K, Arc<V>>>);

impl<V> Cache<PathKey, V> {
    fn new() -> Self {
        Self(Mutex::new(HashMap::new()))
    }

    fn get(&self, key: &PathKey, make: impl FnOnce() -> Result<V>) -> Result<Arc<V>> {
        if let Some(found) = self.lock().get(key) {
            return Ok(found.clone());
        }
        let made = Arc::new(make()?);
        let mut entries = self.lock();
        // What the path named before is not asked for again.
        entries.retain(|(path, ..), _| path != &key.0);
        if entries.len() >= MAX_CACHED {
            entries.clear();
        }
        Ok(entries.entry(key.clone()).or_insert(made).clone())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<PathKey, Arc<V>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A path as it was when it was opened; a replaced file is opened anew.
type PathKey = (String, u64, u64, i64);

pub struct Host {
    pub proc: OwnedFd,
    pub root: OwnedFd,
    pub mnt: OwnedFd,
    pub net: OwnedFd,
    /// A tmpfs with the device nodes, cloned for every sandbox.
    pub dev: OwnedFd,
    pub null: OwnedFd,
    files: Cache<PathKey, OwnedFd>,
    filters: Cache<PathKey, Vec<u64>>,
}

impl Host {
    pub fn open() -> Result<Self> {
        let here = |path: &str, flags: i32| -> Result<OwnedFd> {
            // SAFETY: AT_FDCWD is always valid to borrow.
            sys::openat(
                unsafe { BorrowedFd::borrow_raw(libc::AT_FDCWD) },
                path,
                flags,
            )
        };
        let dev = make_dev()?;
        Ok(Self {
            proc: here("/proc", libc::O_PATH | libc::O_DIRECTORY)?,
            root: here("/", libc::O_PATH | libc::O_DIRECTORY)?,
            mnt: here("/proc/self/ns/mnt", libc::O_RDONLY)?,
            net: here("/proc/self/ns/net", libc::O_RDONLY)?,
            null: here("/dev/null", libc::O_RDWR)?,
            dev,
            files: Cache::new(),
            filters: Cache::new(),
        })
    }

    fn key(&self, path: &str) -> Result<(OwnedFd, PathKey)> {
        let fd = sys::open_in_root(self.root.as_fd(), path, libc::O_RDONLY)?;
        // SAFETY: stat is plain data that fstat fills.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: `stat` is valid for writing.
        if unsafe { libc::fstat(fd.as_raw_fd(), &mut stat) } != 0 {
            return Err(Error::last("fstat", path));
        }
        let key = (
            path.to_owned(),
            stat.st_dev,
            stat.st_ino,
            stat.st_mtime * 1_000_000_000 + stat.st_mtime_nsec,
        );
        Ok((fd, key))
    }

    /// A program or template, opened read-only.
    pub fn file(&self, path: &str) -> Result<Arc<OwnedFd>> {
        let (fd, key) = self.key(path)?;
        self.files.get(&key, || Ok(fd))
    }

    /// A seccomp program: the instructions of a BPF blob, eight bytes each.
    pub fn filter(&self, path: &str) -> Result<Arc<Vec<u64>>> {
        let (fd, key) = self.key(path)?;
        self.filters.get(&key, || {
            let mut data = Vec::new();
            let mut file = std::fs::File::from(fd);
            std::io::Read::read_to_end(&mut file, &mut data)
                .map_err(|e| Error::os("read", path, e))?;
            if data.is_empty() || data.len() % 8 != 0 || data.len() > 8 * 4096 {
                return Err(Error::Invalid(format!("{path} is no BPF program")));
            }
            let words = data
                .chunks_exact(8)
                .filter_map(|c| c.try_into().ok().map(u64::from_ne_bytes));
            Ok(words.collect())
        })
    }
}

fn make_dev() -> Result<OwnedFd> {
    const NODES: [(&std::ffi::CStr, u32, u32); 6] = [
        (c"null", 1, 3),
        (c"zero", 1, 5),
        (c"full", 1, 7),
        (c"random", 1, 8),
        (c"urandom", 1, 9),
        (c"tty", 5, 0),
    ];
    const LINKS: [(&std::ffi::CStr, &std::ffi::CStr); 5] = [
        (c"/proc/self/fd", c"fd"),
        (c"/proc/self/fd/0", c"stdin"),
        (c"/proc/self/fd/1", c"stdout"),
        (c"/proc/self/fd/2", c"stderr"),
        (c"pts/ptmx", c"ptmx"),
    ];
    let context = FsContext::open(c"tmpfs")?;
    context.string(c"size", "64k")?;
    context.string(c"mode", "0755")?;
    let dev = context.mount(sys::MOUNT_ATTR_NOSUID | sys::MOUNT_ATTR_NOEXEC)?;
    for (name, major, minor) in NODES {
        let number = libc::makedev(major, minor);
        // SAFETY: the name is NUL-terminated.
        if unsafe {
            libc::mknodat(
                dev.as_raw_fd(),
                name.as_ptr(),
                libc::S_IFCHR | 0o666,
                number,
            )
        } != 0
        {
            return Err(Error::last("mknod", name.to_string_lossy()));
        }
        // The umask of the launcher must not narrow them.
        // SAFETY: as above.
        if unsafe { libc::fchmodat(dev.as_raw_fd(), name.as_ptr(), 0o666, 0) } != 0 {
            return Err(Error::last("chmod", name.to_string_lossy()));
        }
    }
    for (target, name) in LINKS {
        // SAFETY: both strings are NUL-terminated.
        if unsafe { libc::symlinkat(target.as_ptr(), dev.as_raw_fd(), name.as_ptr()) } != 0 {
            return Err(Error::last("symlink", name.to_string_lossy()));
        }
    }
    sys::mkdirat(dev.as_fd(), "pts", 0o755)?;
    sys::mkdirat(dev.as_fd(), "shm", 0o1777)?;
    Ok(dev)
}
