//! Thin wrappers over the system calls the launcher needs and libc does not wrap. Each returns owned descriptors and a
//! typed error; nothing here decides anything. The `raw` module is safe to call from a vfork child: no allocation.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use crate::error::{Error, Result};

pub const MOUNT_ATTR_RDONLY: u64 = 0x1;
pub const MOUNT_ATTR_NOSUID: u64 = 0x2;
pub const MOUNT_ATTR_NODEV: u64 = 0x4;
pub const MOUNT_ATTR_NOEXEC: u64 = 0x8;
const MOUNT_ATTR_IDMAP: u64 = 0x0010_0000;
const PIDFD_GET_USER_NAMESPACE: libc::c_ulong = 0xff09;
const PIDFD_GET_NET_NAMESPACE: libc::c_ulong = 0xff04;

/// System calls for code that shares its parent's memory: they touch no allocator and no lock.
pub mod raw {
    use std::ffi::CStr;
    use std::os::fd::RawFd;

    #[repr(C)]
    #[derive(Default)]
    pub struct MountAttr {
        pub set: u64,
        pub clear: u64,
        pub propagation: u64,
        pub userns: u64,
    }

    fn ret(value: libc::c_long) -> Result<i32, i32> {
        if value < 0 {
            // SAFETY: errno is thread-local; a vfork child shares the slot of its suspended parent.
            Err(unsafe { *libc::__errno_location() })
        } else {
            Ok(value as i32)
        }
    }

    /// Turns a libc return value into a result with the errno.
    pub fn check(value: libc::c_int) -> Result<i32, i32> {
        ret(libc::c_long::from(value))
    }

    pub fn fsopen(name: &CStr) -> Result<RawFd, i32> {
        // SAFETY: the name is NUL-terminated; FSOPEN_CLOEXEC is 1.
        ret(unsafe { libc::syscall(libc::SYS_fsopen, name.as_ptr(), 1) })
    }

    /// `cmd`: 0 flag, 1 string, 5 descriptor, 6 create.
    pub fn fsconfig(
        fd: RawFd,
        cmd: u32,
        key: Option<&CStr>,
        value: Option<&CStr>,
        aux: RawFd,
    ) -> Result<i32, i32> {
        let key = key.map_or(std::ptr::null(), CStr::as_ptr);
        let value = value.map_or(std::ptr::null(), CStr::as_ptr);
        // SAFETY: both pointers are null or NUL-terminated strings that outlive the call.
        ret(unsafe { libc::syscall(libc::SYS_fsconfig, fd, cmd, key, value, aux) })
    }

    pub fn fsmount(fd: RawFd, attrs: u64) -> Result<RawFd, i32> {
        // SAFETY: no pointers; FSMOUNT_CLOEXEC is 1.
        ret(unsafe { libc::syscall(libc::SYS_fsmount, fd, 1, attrs as libc::c_uint) })
    }

    pub fn bind(from: &CStr, to: &CStr, flags: libc::c_ulong) -> Result<i32, i32> {
        let none = std::ptr::null();
        // SAFETY: both paths are NUL-terminated; type and data are not used by a bind.
        check(unsafe {
            libc::mount(
                from.as_ptr(),
                to.as_ptr(),
                none,
                flags | libc::MS_BIND,
                none.cast(),
            )
        })
    }

    /// Changes an attached mount.
    pub fn set_attached(path: &CStr, set: u64) -> Result<i32, i32> {
        let attr = MountAttr {
            set,
            ..MountAttr::default()
        };
        let size = std::mem::size_of::<MountAttr>();
        // SAFETY: `attr` has the layout of struct mount_attr and its size is passed along.
        ret(unsafe {
            libc::syscall(
                libc::SYS_mount_setattr,
                libc::AT_FDCWD,
                path.as_ptr(),
                0,
                &raw const attr,
                size,
            )
        })
    }

    pub fn move_mount(from: RawFd, dir: RawFd, path: &CStr) -> Result<i32, i32> {
        // SAFETY: both strings are NUL-terminated; 4 is MOVE_MOUNT_F_EMPTY_PATH.
        ret(unsafe {
            libc::syscall(
                libc::SYS_move_mount,
                from,
                c"".as_ptr(),
                dir,
                path.as_ptr(),
                4,
            )
        })
    }

    pub fn open_tree(dir: RawFd, path: &CStr, flags: libc::c_uint) -> Result<RawFd, i32> {
        let flags = flags | 1 | libc::O_CLOEXEC as libc::c_uint;
        // SAFETY: the path is NUL-terminated; 1 is OPEN_TREE_CLONE.
        ret(unsafe { libc::syscall(libc::SYS_open_tree, dir, path.as_ptr(), flags) })
    }

    pub fn mount_setattr(fd: RawFd, attr: &MountAttr) -> Result<i32, i32> {
        let size = std::mem::size_of::<MountAttr>();
        let attr = std::ptr::from_ref(attr);
        // SAFETY: `attr` has the layout of struct mount_attr and its size is passed along.
        ret(unsafe {
            libc::syscall(
                libc::SYS_mount_setattr,
                fd,
                c"".as_ptr(),
                libc::AT_EMPTY_PATH,
                attr,
                size,
            )
        })
    }

    pub fn write(fd: RawFd, data: &[u8]) -> Result<i32, i32> {
        // SAFETY: the buffer is valid for its length.
        ret(unsafe { libc::write(fd, data.as_ptr().cast(), data.len()) } as libc::c_long)
    }

    pub fn close(fd: RawFd) {
        // SAFETY: callers pass descriptors that only they own.
        unsafe { libc::close(fd) };
    }

    pub fn setfsid(id: u32) {
        // SAFETY: plain system calls that act on this thread alone.
        unsafe {
            libc::syscall(libc::SYS_setfsgid, id);
            libc::syscall(libc::SYS_setfsuid, id);
        }
    }

    pub fn now_us() -> u64 {
        let mut ts = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: `ts` is a valid timespec.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut ts) };
        ts.tv_sec as u64 * 1_000_000 + ts.tv_nsec as u64 / 1000
    }
}

fn own(op: &'static str, what: &str, value: std::result::Result<i32, i32>) -> Result<OwnedFd> {
    match value {
        // SAFETY: the kernel just made this descriptor for us.
        Ok(fd) => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        Err(errno) => Err(Error::os(op, what, io::Error::from_raw_os_error(errno))),
    }
}

pub fn cstring(text: impl Into<Vec<u8>>) -> Result<CString> {
    CString::new(text).map_err(|_| Error::Invalid("a string contains a NUL byte".into()))
}

/// A file system context being configured, `fsopen` to `fsmount`.
pub struct FsContext {
    fd: OwnedFd,
    name: &'static CStr,
}

impl FsContext {
    pub fn open(name: &'static CStr) -> Result<Self> {
        Ok(Self {
            fd: own("fsopen", &name.to_string_lossy(), raw::fsopen(name))?,
            name,
        })
    }

    fn check(&self, what: &str, value: std::result::Result<i32, i32>) -> Result<()> {
        let Err(errno) = value else { return Ok(()) };
        let mut text = format!("{} {what}", self.name.to_string_lossy());
        let mut buf = [0u8; 256];
        // The kernel queues its messages on the context; they name the option that was wrong.
        // SAFETY: the buffer is valid for its length.
        let n = unsafe { libc::read(self.fd.as_raw_fd(), buf.as_mut_ptr().cast(), buf.len()) };
        if n > 0 {
            text += &format!(" ({})", String::from_utf8_lossy(&buf[..n as usize]).trim());
        }
        Err(Error::os(
            "fsconfig",
            text,
            io::Error::from_raw_os_error(errno),
        ))
    }

    pub fn string(&self, key: &CStr, value: &str) -> Result<()> {
        let text = cstring(value)?;
        self.check(
            &key.to_string_lossy(),
            raw::fsconfig(self.fd.as_raw_fd(), 1, Some(key), Some(&text), 0),
        )
    }

    pub fn flag(&self, key: &CStr) -> Result<()> {
        self.check(
            &key.to_string_lossy(),
            raw::fsconfig(self.fd.as_raw_fd(), 0, Some(key), None, 0),
        )
    }

    pub fn fd(&self, key: &CStr, value: BorrowedFd) -> Result<()> {
        let aux = value.as_raw_fd();
        self.check(
            &key.to_string_lossy(),
            raw::fsconfig(self.fd.as_raw_fd(), 5, Some(key), None, aux),
        )
    }

    pub fn mount(self, attrs: u64) -> Result<OwnedFd> {
        self.check(
            "create",
            raw::fsconfig(self.fd.as_raw_fd(), 6, None, None, 0),
        )?;
        own(
            "fsmount",
            &self.name.to_string_lossy(),
            raw::fsmount(self.fd.as_raw_fd(), attrs),
        )
    }
}

/// A detached copy of the mount `fd` lies on (of the whole directory `path` below it).
pub fn open_tree(fd: BorrowedFd, path: &CStr) -> Result<OwnedFd> {
    let flags = if path.is_empty() {
        libc::AT_EMPTY_PATH as u32
    } else {
        0
    };
    own(
        "open_tree",
        &path.to_string_lossy(),
        raw::open_tree(fd.as_raw_fd(), path, flags),
    )
}

/// Changes a detached mount's attributes; with `userns` it also becomes idmapped (once in its life).
pub fn mount_setattr(fd: BorrowedFd, set: u64, userns: Option<BorrowedFd>) -> Result<()> {
    let mut attr = raw::MountAttr {
        set,
        ..Default::default()
    };
    if let Some(ns) = userns {
        attr.set |= MOUNT_ATTR_IDMAP;
        attr.userns = ns.as_raw_fd() as u64;
    }
    match raw::mount_setattr(fd.as_raw_fd(), &attr) {
        Ok(_) => Ok(()),
        Err(errno) => Err(Error::os(
            "mount_setattr",
            "",
            io::Error::from_raw_os_error(errno),
        )),
    }
}

pub fn openat(dir: BorrowedFd, path: &str, flags: i32) -> Result<OwnedFd> {
    openat_mode(dir, path, flags, 0)
}

pub fn openat_mode(dir: BorrowedFd, path: &str, flags: i32, mode: u32) -> Result<OwnedFd> {
    let name = cstring(path)?;
    // SAFETY: the path is NUL-terminated.
    let fd = unsafe {
        libc::openat(
            dir.as_raw_fd(),
            name.as_ptr(),
            flags | libc::O_CLOEXEC,
            mode,
        )
    };
    own("open", path, raw::check(fd))
}

/// Opens `path` as if `root` were "/": works from a thread whose own root is an empty directory.
pub fn open_in_root(root: BorrowedFd, path: &str, flags: i32) -> Result<OwnedFd> {
    #[repr(C)]
    struct OpenHow {
        flags: u64,
        mode: u64,
        resolve: u64,
    }
    const RESOLVE_IN_ROOT: u64 = 0x10;
    let name = cstring(path)?;
    let how = OpenHow {
        flags: (flags | libc::O_CLOEXEC) as u64,
        mode: 0,
        resolve: RESOLVE_IN_ROOT,
    };
    let size = std::mem::size_of::<OpenHow>();
    // SAFETY: `how` has the layout of struct open_how and its size is passed along.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_openat2,
            root.as_raw_fd(),
            name.as_ptr(),
            &raw const how,
            size,
        )
    };
    own("open", path, raw::check(fd as i32))
}

pub fn mkdirat(dir: BorrowedFd, path: &str, mode: u32) -> Result<()> {
    let name = cstring(path)?;
    // SAFETY: the path is NUL-terminated.
    match unsafe { libc::mkdirat(dir.as_raw_fd(), name.as_ptr(), mode) } {
        0 => Ok(()),
        _ => Err(Error::last("mkdir", path)),
    }
}

pub fn rmdirat(dir: BorrowedFd, path: &str) -> Result<()> {
    let name = cstring(path)?;
    // SAFETY: the path is NUL-terminated.
    match unsafe { libc::unlinkat(dir.as_raw_fd(), name.as_ptr(), libc::AT_REMOVEDIR) } {
        0 => Ok(()),
        _ => Err(Error::last("rmdir", path)),
    }
}

pub fn chownat(dir: BorrowedFd, path: &str, id: u32) -> Result<()> {
    let name = cstring(path)?;
    // SAFETY: the path is NUL-terminated.
    match unsafe { libc::fchownat(dir.as_raw_fd(), name.as_ptr(), id, id, 0) } {
        0 => Ok(()),
        _ => Err(Error::last("chown", path)),
    }
}

pub fn write_at(dir: BorrowedFd, path: &str, data: &str) -> Result<()> {
    /// The kernel gives up changing a memory limit when anything is pending for the thread; it is not for long.
    const INTERRUPTIONS: usize = 100;
    let fd = openat(dir, path, libc::O_WRONLY)?;
    let mut done = raw::write(fd.as_raw_fd(), data.as_bytes());
    for _ in 0..INTERRUPTIONS {
        if done != Err(libc::EINTR) {
            break;
        }
        done = raw::write(fd.as_raw_fd(), data.as_bytes());
    }
    match done {
        Ok(_) => Ok(()),
        Err(errno) => Err(Error::os(
            "write",
            format!("{path} = {data}"),
            io::Error::from_raw_os_error(errno),
        )),
    }
}

/// Reads a pseudo file whole.
pub fn read_at(dir: BorrowedFd, path: &str) -> Result<String> {
    read_file(dir, path, false)
}

/// Reads a pseudo file that the kernel gives in one piece: half the system calls.
pub fn read_small(dir: BorrowedFd, path: &str) -> Result<String> {
    read_file(dir, path, true)
}

fn read_file(dir: BorrowedFd, path: &str, once: bool) -> Result<String> {
    let fd = openat(dir, path, libc::O_RDONLY)?;
    let mut data = Vec::new();
    let mut buf = [0u8; 16_384];
    loop {
        // SAFETY: the buffer is valid for its length.
        match unsafe { libc::read(fd.as_raw_fd(), buf.as_mut_ptr().cast(), buf.len()) } {
            n if n < 0 => return Err(Error::last("read", path)),
            n => {
                data.extend_from_slice(&buf[..n as usize]);
                if n == 0 || (once && (n as usize) < buf.len()) {
                    return Ok(String::from_utf8_lossy(&data).into_owned());
                }
            }
        }
    }
}

/// How many directories a directory of a cgroup hierarchy holds; None if it does not exist.
pub fn subdirectories(dir: BorrowedFd, path: &str) -> Option<u64> {
    let name = cstring(path).ok()?;
    // SAFETY: stat is plain data that fstatat fills.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the path is NUL-terminated and `stat` valid for writing.
    let done = unsafe { libc::fstatat(dir.as_raw_fd(), name.as_ptr(), &mut stat, 0) };
    (done == 0).then(|| stat.st_nlink.saturating_sub(2))
}

/// The names in a directory, without `.` and `..`.
pub fn list_at(dir: BorrowedFd, path: &str) -> Result<Vec<(String, bool)>> {
    let fd = openat(dir, path, libc::O_RDONLY | libc::O_DIRECTORY)?;
    let mut names = Vec::new();
    let mut buf = [0u8; 8192];
    loop {
        // SAFETY: the buffer is valid for its length.
        let n = unsafe {
            libc::syscall(
                libc::SYS_getdents64,
                fd.as_raw_fd(),
                buf.as_mut_ptr(),
                buf.len(),
            )
        };
        if n < 0 {
            return Err(Error::last("getdents", path));
        }
        if n == 0 {
            return Ok(names);
        }
        let mut at = 0;
        while at + 19 < n as usize {
            let length = usize::from(u16::from_ne_bytes([buf[at + 16], buf[at + 17]]));
            let name = CStr::from_bytes_until_nul(&buf[at + 19..at + length]).unwrap_or(c"");
            if name != c"." && name != c".." {
                names.push((
                    name.to_string_lossy().into_owned(),
                    buf[at + 18] == libc::DT_DIR,
                ));
            }
            at += length;
        }
    }
}

pub fn dup(fd: BorrowedFd) -> Result<OwnedFd> {
    fd.try_clone_to_owned().map_err(|e| Error::os("dup", "", e))
}

/// Puts a copy of `fd` at a reserved number, which keeps a descriptor there for ever.
pub fn dup_onto(fd: RawFd, number: RawFd) -> Result<()> {
    // SAFETY: `number` is reserved for the caller, so nobody's descriptor is closed by this.
    match unsafe { libc::dup3(fd, number, libc::O_CLOEXEC) } {
        -1 => Err(Error::last("dup3", "")),
        _ => Ok(()),
    }
}

pub fn setns(fd: BorrowedFd, kind: i32) -> Result<()> {
    // SAFETY: no pointers; acts on this thread alone.
    match unsafe { libc::setns(fd.as_raw_fd(), kind) } {
        0 => Ok(()),
        _ => Err(Error::last("setns", "")),
    }
}

pub fn pidfd_namespace(pidfd: BorrowedFd, user: bool) -> Result<OwnedFd> {
    let request = if user {
        PIDFD_GET_USER_NAMESPACE
    } else {
        PIDFD_GET_NET_NAMESPACE
    };
    // SAFETY: these requests take no argument and return a descriptor.
    own(
        "ioctl",
        "pidfd namespace",
        raw::check(unsafe { libc::ioctl(pidfd.as_raw_fd(), request, 0) }),
    )
}

pub fn pidfd_open(pid: i32) -> Result<OwnedFd> {
    // SAFETY: no pointers.
    own(
        "pidfd_open",
        &pid.to_string(),
        raw::check(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) } as i32),
    )
}

pub fn pidfd_kill(pidfd: BorrowedFd) {
    // A process that is gone already needs no signal, so the result does not matter.
    // SAFETY: a null siginfo is allowed.
    unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            pidfd.as_raw_fd(),
            libc::SIGKILL,
            0usize,
            0,
        );
    }
}

/// Waits until a descriptor is readable; false at the deadline.
pub fn poll_in(fd: BorrowedFd, timeout: Option<Duration>) -> bool {
    let mut entry = libc::pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    let end = timeout.map(|t| std::time::Instant::now() + t);
    loop {
        let left = end.map_or(-1, |e| {
            e.saturating_duration_since(std::time::Instant::now())
                .as_millis() as i32
        });
        // SAFETY: one valid pollfd.
        match unsafe { libc::poll(&mut entry, 1, left) } {
            0 => return false,
            n if n > 0 => return true,
            _ if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            _ => return false,
        }
    }
}

/// Reaps a child: exit code n as n, death by signal n as -n; None if it is not our child.
pub fn wait_child(pidfd: BorrowedFd) -> Option<i32> {
    loop {
        // SAFETY: siginfo_t is plain data that waitid fills.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        let id = pidfd.as_raw_fd() as libc::id_t;
        // SAFETY: `info` is valid for writing.
        let result = unsafe { libc::waitid(libc::P_PIDFD, id, &mut info, libc::WEXITED) };
        if result == 0 {
            // SAFETY: waitid filled the SIGCHLD fields.
            let status = unsafe { info.si_status() };
            return Some(if info.si_code == libc::CLD_EXITED {
                status
            } else {
                -status
            });
        }
        if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return None;
        }
    }
}

/// The exit status a pidfd still knows after its process was reaped by someone else (kernel >= 6.15).
pub fn pidfd_exit_status(pidfd: BorrowedFd) -> Option<i32> {
    const PIDFD_INFO_EXIT: u64 = 1 << 3;
    const PIDFD_GET_INFO_64: libc::c_ulong = 0xc040_ff0b;
    let mut info = [0u64; 8];
    info[0] = PIDFD_INFO_EXIT;
    // SAFETY: the buffer has the 64 bytes that the request's size field announces.
    if unsafe { libc::ioctl(pidfd.as_raw_fd(), PIDFD_GET_INFO_64, info.as_mut_ptr()) } != 0 {
        return None;
    }
    if info[0] & PIDFD_INFO_EXIT == 0 {
        return None;
    }
    // struct pidfd_info ends with __s32 exit_code at byte 60, a wait status.
    let status = (info[7] >> 32) as i32;
    Some(if libc::WIFEXITED(status) {
        libc::WEXITSTATUS(status)
    } else {
        -libc::WTERMSIG(status)
    })
}
