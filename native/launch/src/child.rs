//! What runs between clone and exec, in the launcher's memory. Everything it needs was prepared in a `Plan`.
//!
//! The rule a reader could break: nothing here may allocate, lock, panic or return. Errors go into the plan, which the
//! suspended parent reads.

use std::ffi::{c_char, c_void, CStr};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use crate::error::Error;
use crate::root::Step;
use crate::sys::raw::{self, check};
use crate::sys::{self, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC, MOUNT_ATTR_NOSUID, MOUNT_ATTR_RDONLY};

/// Points in time of a child, for the `us` of the answer.
pub const MARKS: [&str; 6] = ["clone", "root", "mounts", "cgroup", "seccomp", "cred"];

pub struct Plan<'a> {
    pub net: Option<RawFd>,
    pub host_mnt: RawFd,
    /// Files to write "0" to: the v1 groups to enter.
    pub tasks: &'a [RawFd],
    pub new_cgroup_ns: bool,
    pub own_mounts: bool,
    pub overlay: Option<RawFd>,
    pub parts: &'a [RawFd],
    pub steps: &'a mut [Step],
    /// Owner of what has to be made in the root: the sandbox's own root.
    pub fsid: u32,
    pub hostname: Option<&'a CStr>,
    pub affinity: Option<&'a libc::cpu_set_t>,
    pub rlimits: &'a [(u32, u64, u64)],
    pub filter: Option<&'a [u64]>,
    /// Staged descriptors lie at stage..stage+named; then the program (if any), then /dev/null at stage+width-1.
    pub stage: RawFd,
    pub null: RawFd,
    pub named: i32,
    pub exe: bool,
    pub end: RawFd,
    pub first_final: RawFd,
    pub identity: (u32, u32),
    pub caps: u64,
    pub sealed: bool,
    pub argv: &'a [*const c_char],
    pub envp: &'a [*const c_char],
    pub step: &'static str,
    pub errno: i32,
    pub marks: [u64; MARKS.len()],
}

/// What a worker's root holds besides; the overlay covers it, and nothing inside the sandbox finds it.
const PARTS: &CStr = c"/parts";
const NULL: &CStr = c"/null";
const VOID: &CStr = c"/void";

/// Makes these in the root of a worker's mount namespace.
pub fn furnish(root: BorrowedFd) -> Result<(), Error> {
    let inner = |path: &CStr| path.to_string_lossy()[1..].to_owned();
    sys::mkdirat(root, &inner(PARTS), 0o700)?;
    sys::mkdirat(root, &inner(VOID), 0o555)?;
    let name = sys::cstring(inner(NULL))?;
    // SAFETY: the name is NUL-terminated.
    match unsafe {
        libc::mknodat(
            root.as_raw_fd(),
            name.as_ptr(),
            libc::S_IFCHR | 0o666,
            libc::makedev(1, 3),
        )
    } {
        0 => Ok(()),
        _ => Err(Error::last("mknod", "null")),
    }
}

type Step0 = Result<i32, i32>;

pub extern "C" fn run(plan: *mut c_void) -> ! {
    // SAFETY: the parent passes its plan and is suspended until we exec or exit.
    let plan = unsafe { &mut *plan.cast::<Plan>() };
    if let Err(errno) = enter(plan) {
        plan.errno = errno;
    }
    // SAFETY: ends this process only.
    unsafe { libc::_exit(127) }
}

fn enter(p: &mut Plan) -> Step0 {
    p.marks[0] = raw::now_us();
    reset_signals();
    join_network(p)?;
    take_root(p)?;
    p.marks[1] = raw::now_us();
    mount_all(p)?;
    confine(p)?;
    p.marks[2] = raw::now_us();
    join_cgroups(p)?;
    p.marks[3] = raw::now_us();
    configure(p)?;
    p.marks[4] = raw::now_us();
    stage_descriptors(p)?;
    become_identity(p)?;
    p.marks[5] = raw::now_us();
    exec(p)
}

/// Ignored signals would stay ignored across exec.
fn reset_signals() {
    for signal in [libc::SIGPIPE, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT] {
        // SAFETY: SIG_DFL needs no handler; the table is this process's own.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    // SAFETY: a plain system call.
    unsafe { libc::setsid() };
}

fn join_network(p: &mut Plan) -> Step0 {
    let Some(net) = p.net else { return Ok(0) };
    p.step = "setns net";
    // SAFETY: a plain system call.
    check(unsafe { libc::setns(net, libc::CLONE_NEWNET) })
}

/// Late, so that the set-up runs neither with the sandbox's share of the CPU nor on its memory; but before the filter, which may
/// refuse unshare.
fn join_cgroups(p: &mut Plan) -> Step0 {
    p.step = "enter cgroup";
    for fd in p.tasks {
        raw::write(*fd, b"0")?;
    }
    if p.new_cgroup_ns {
        // After the attach: before it, the namespace's root would be the host's group.
        p.step = "unshare cgroup";
        // SAFETY: a plain system call.
        check(unsafe { libc::unshare(libc::CLONE_NEWCGROUP) })?;
    }
    Ok(0)
}

fn take_root(p: &mut Plan) -> Step0 {
    let Some(overlay) = p.overlay else {
        // A program of the host: leave the worker's empty mount namespace for the host's.
        p.step = "setns mnt";
        // SAFETY: plain system calls.
        check(unsafe { libc::setns(p.host_mnt, libc::CLONE_NEWNS) })?;
        if p.own_mounts {
            p.step = "unshare mnt";
            // SAFETY: plain system calls with NUL-terminated strings.
            check(unsafe { libc::unshare(libc::CLONE_NEWNS) })?;
            let flags = libc::MS_REC | libc::MS_PRIVATE;
            // SAFETY: null source, type and data are allowed for a change of propagation.
            check(unsafe {
                libc::mount(
                    std::ptr::null(),
                    c"/".as_ptr(),
                    std::ptr::null(),
                    flags,
                    std::ptr::null(),
                )
            })?;
        }
        return Ok(0);
    };
    p.step = "attach root";
    for part in p.parts {
        raw::move_mount(*part, libc::AT_FDCWD, PARTS)?;
    }
    raw::move_mount(overlay, libc::AT_FDCWD, c"/")?;
    p.step = "chdir";
    // SAFETY: a plain system call.
    check(unsafe { libc::fchdir(overlay) })
}

/// chroot instead of pivot_root, which walks every task on the host. What a second chroot can climb to is this same overlay: it
/// covers the namespace's own root.
fn confine(p: &mut Plan) -> Step0 {
    if p.overlay.is_none() {
        return Ok(0);
    }
    p.step = "chroot";
    // SAFETY: NUL-terminated strings.
    unsafe {
        check(libc::chroot(c".".as_ptr()))?;
        check(libc::chdir(c"/".as_ptr()))
    }
}

fn mount_all(p: &mut Plan) -> Step0 {
    if p.steps.is_empty() {
        return Ok(0);
    }
    // What must be made in the overlay has to belong to the sandbox.
    raw::setfsid(p.fsid);
    for step in p.steps.iter_mut() {
        match step {
            Step::Attach {
                fd,
                path,
                directory,
            } => {
                p.step = "mount";
                attach(*fd, path, *directory)?;
            }
            Step::Proc => {
                p.step = "mount proc";
                let context = raw::fsopen(c"proc")?;
                raw::fsconfig(context, 6, None, None, 0)?;
                let mount = raw::fsmount(
                    context,
                    MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC,
                )?;
                raw::close(context);
                attach(mount, &mut b"proc\0".to_owned(), true)?;
                raw::close(mount);
            }
            Step::Mask { path } => {
                p.step = "mask";
                mask(text(path))?;
            }
            Step::ReadOnly { path } => {
                p.step = "read-only";
                read_only(text(path))?;
            }
        }
    }
    raw::setfsid(0);
    Ok(0)
}

fn text(path: &[u8]) -> &CStr {
    CStr::from_bytes_until_nul(path).unwrap_or(c"")
}

fn attach(mount: RawFd, path: &mut [u8], directory: bool) -> Step0 {
    match raw::move_mount(mount, libc::AT_FDCWD, text(path)) {
        Err(libc::ENOENT) => {
            make_point(path, directory)?;
            raw::move_mount(mount, libc::AT_FDCWD, text(path))
        }
        done => done,
    }
}

/// Makes a mount point with its parents, cutting the path at each slash for a moment.
fn make_point(path: &mut [u8], directory: bool) -> Step0 {
    let length = path.len().saturating_sub(1);
    for at in 1..length {
        if path[at] == b'/' {
            path[at] = 0;
            // SAFETY: the path is NUL-terminated at `at`.
            let made = check(unsafe { libc::mkdir(path.as_ptr().cast(), 0o755) });
            path[at] = b'/';
            if !matches!(made, Ok(_) | Err(libc::EEXIST)) {
                return made;
            }
        }
    }
    let name = path.as_ptr().cast();
    if directory {
        // SAFETY: the path is NUL-terminated.
        return check(unsafe { libc::mkdir(name, 0o755) });
    }
    // SAFETY: as above.
    let fd = check(unsafe {
        libc::open(
            name,
            libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_CLOEXEC,
            0o644,
        )
    })?;
    raw::close(fd);
    Ok(0)
}

fn mask(path: &CStr) -> Step0 {
    // SAFETY: stat is plain data that fstatat fills; the path is NUL-terminated.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    let found = check(unsafe {
        libc::fstatat(
            libc::AT_FDCWD,
            path.as_ptr(),
            &mut stat,
            libc::AT_SYMLINK_NOFOLLOW,
        )
    });
    // A file cannot lie on a directory; to try it costs an RCU grace period, 240 us. The copy is read-only as the worker's root is.
    let source = match stat.st_mode & libc::S_IFMT {
        libc::S_IFDIR => VOID,
        _ => NULL,
    };
    ignore_missing(found.and_then(|_| raw::bind(source, path, 0)))
}

fn read_only(path: &CStr) -> Step0 {
    let done = raw::bind(path, path, libc::MS_REC);
    ignore_missing(done.and_then(|_| raw::set_attached(path, MOUNT_ATTR_RDONLY)))
}

fn ignore_missing(done: Step0) -> Step0 {
    match done {
        Err(libc::ENOENT) => Ok(0),
        other => other,
    }
}

fn configure(p: &mut Plan) -> Step0 {
    if let Some(name) = p.hostname {
        p.step = "sethostname";
        // SAFETY: the name is valid for its length.
        check(unsafe { libc::sethostname(name.as_ptr(), name.count_bytes()) })?;
    }
    if let Some(set) = p.affinity {
        p.step = "sched_setaffinity";
        // SAFETY: the set is valid for its size.
        check(unsafe { libc::sched_setaffinity(0, std::mem::size_of::<libc::cpu_set_t>(), set) })?;
    }
    p.step = "setrlimit";
    for (resource, soft, hard) in p.rlimits {
        let limit = libc::rlimit {
            rlim_cur: *soft,
            rlim_max: *hard,
        };
        // SAFETY: the limit is valid for reading.
        check(unsafe { libc::setrlimit(*resource, &limit) })?;
    }
    if let Some(filter) = p.filter {
        p.step = "seccomp";
        let program = libc::sock_fprog {
            len: filter.len() as u16,
            filter: filter.as_ptr() as *mut libc::sock_filter,
        };
        // SAFETY: the program points to `len` instructions; SECCOMP_SET_MODE_FILTER is 1.
        check(unsafe { libc::syscall(libc::SYS_seccomp, 1, 0, &program) } as i32)?;
    }
    Ok(0)
}

/// Takes a descriptor table of its own that holds only the low numbers, then lays them out as the program expects.
fn stage_descriptors(p: &mut Plan) -> Step0 {
    const CLOSE_RANGE_UNSHARE: u32 = 2;
    p.step = "descriptors";
    // SAFETY: plain system calls on numbers that this child's own table holds from here on.
    unsafe {
        check(libc::syscall(libc::SYS_close_range, p.end, u32::MAX, CLOSE_RANGE_UNSHARE) as i32)?;
        for number in 0..3 {
            check(libc::dup2(p.null, number))?;
        }
        for i in 0..p.named {
            check(libc::dup2(p.stage + i, p.first_final + i))?;
        }
        let mut next = p.first_final + p.named;
        if p.exe {
            check(libc::dup3(p.stage + p.named, next, libc::O_CLOEXEC))?;
            next += 1;
        }
        check(libc::syscall(libc::SYS_close_range, next, u32::MAX, 0) as i32)
    }
}

fn become_identity(p: &mut Plan) -> Step0 {
    #[repr(C)]
    struct CapHeader {
        version: u32,
        pid: i32,
    }
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct CapData {
        effective: u32,
        permitted: u32,
        inheritable: u32,
    }
    let (uid, gid) = p.identity;
    p.step = "credentials";
    // SAFETY: raw system calls that act on this process; pointers are valid for their sizes.
    unsafe {
        check(libc::syscall(libc::SYS_setgroups, 0, 0usize) as i32)?;
        check(libc::syscall(libc::SYS_setresgid, gid, gid, gid) as i32)?;
        check(libc::syscall(libc::SYS_setresuid, uid, uid, uid) as i32)?;
        // The worker's securebit kept all capabilities over the change of uid. It must not be inherited.
        check(libc::prctl(libc::PR_SET_SECUREBITS, 0, 0, 0, 0))?;
        let half = |bits: u64| CapData {
            effective: bits as u32,
            permitted: bits as u32,
            inheritable: bits as u32,
        };
        let data = [half(p.caps & 0xffff_ffff), half(p.caps >> 32)];
        let header = CapHeader {
            version: 0x2008_0522,
            pid: 0,
        };
        check(libc::syscall(libc::SYS_capset, &header, data.as_ptr()) as i32)?;
        for cap in 0..64u64 {
            if p.caps >> cap & 1 == 1 {
                // PR_CAP_AMBIENT_RAISE: without it the capabilities would be lost at exec.
                check(libc::prctl(
                    libc::PR_CAP_AMBIENT,
                    libc::PR_CAP_AMBIENT_RAISE,
                    cap,
                    0,
                    0,
                ))?;
            }
        }
        if p.sealed {
            // No user namespace stands between this program and the host's set-uid files.
            check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        check(libc::sigprocmask(
            libc::SIG_SETMASK,
            &none,
            std::ptr::null_mut(),
        ))
    }
}

fn exec(p: &mut Plan) -> Step0 {
    p.step = "exec";
    let (argv, envp) = (p.argv.as_ptr(), p.envp.as_ptr());
    let (fd, path) = if p.exe {
        (p.first_final + p.named, c"".as_ptr())
    } else {
        (libc::AT_FDCWD, p.argv[0])
    };
    let flags = if p.exe { libc::AT_EMPTY_PATH } else { 0 };
    // SAFETY: both arrays end with a null pointer and their strings with NUL.
    check(unsafe { libc::syscall(libc::SYS_execveat, fd, path, argv, envp, flags) } as i32)
}
