//! Processes, identities, limits.

use super::consts::*;
use super::{call, nr, Result};
use core::ffi::CStr;

/// Forks. Returns 0 in the child. `clone3`, which could place the child in a cgroup, is refused by the
/// seccomp filter, since its flags cannot be inspected: the child enters its cgroups itself.
pub fn fork() -> Result<i32> {
    call!(nr::CLONE, SIGCHLD, 0usize, 0usize, 0usize, 0usize).map(|pid| pid as i32)
}

/// What `wait4` told of one ended child.
pub struct Ended {
    pub pid: i32,
    pub status: i32,
    pub cpu_us: u64,
    pub peak_bytes: u64,
}

/// What became of a child.
pub enum Change {
    Ended(Ended),
    /// It was stopped by a signal; the kernel tells so once for each stop.
    Stopped(i32),
}

/// Takes one change of a child, and reaps it if it has ended.
pub fn change() -> Option<Change> {
    const WNOHANG: u32 = 1;
    const WUNTRACED: u32 = 2;
    const STOPPED: i32 = 0x7f;
    let mut status = 0i32;
    let mut usage = [0i64; 18];
    let pid = call!(
        nr::WAIT4,
        -1isize,
        &mut status as *mut i32,
        WNOHANG | WUNTRACED,
        usage.as_mut_ptr()
    )
    .ok()?;
    if pid == 0 {
        return None;
    }
    if status & 0xff == STOPPED {
        return Some(Change::Stopped(pid as i32));
    }
    let cpu_us = (usage[0] + usage[2]) * 1_000_000 + usage[1] + usage[3];
    Some(Change::Ended(Ended {
        pid: pid as i32,
        status,
        cpu_us: cpu_us as u64,
        peak_bytes: usage[4] as u64 * 1024,
    }))
}

/// Sends a signal; `pid` may be negative for a process group.
pub fn kill(pid: i32, signal: u32) -> Result<()> {
    call!(nr::KILL, pid as isize, signal).map(drop)
}

pub fn exit(code: i32) -> ! {
    loop {
        let _ = call!(nr::EXIT_GROUP, code);
    }
}

pub fn setsid() {
    let _ = call!(nr::SETSID);
}

pub fn join_user_namespace(fd: i32) -> Result<()> {
    call!(nr::SETNS, fd, CLONE_NEWUSER).map(drop)
}

pub fn set_groups(groups: &[u32]) -> Result<()> {
    call!(nr::SETGROUPS, groups.len(), groups.as_ptr()).map(drop)
}

pub fn set_gid(gid: u32) -> Result<()> {
    call!(nr::SETRESGID, gid, gid, gid).map(drop)
}

pub fn set_uid(uid: u32) -> Result<()> {
    call!(nr::SETRESUID, uid, uid, uid).map(drop)
}

pub fn umask(mask: u32) {
    let _ = call!(nr::UMASK, mask);
}

pub fn chdir(path: &CStr) -> Result<()> {
    call!(nr::CHDIR, path.as_ptr()).map(drop)
}

pub fn set_dumpable(dumpable: bool) {
    const PR_SET_DUMPABLE: u32 = 4;
    let _ = call!(nr::PRCTL, PR_SET_DUMPABLE, dumpable);
}

/// Drops from the bounding set what is not in `keep`.
pub fn limit_bounding_set(keep: u64) -> Result<()> {
    const PR_CAPBSET_DROP: u32 = 24;
    for cap in 0..64 {
        if keep >> cap & 1 == 0 {
            match call!(nr::PRCTL, PR_CAPBSET_DROP, cap) {
                // Beyond the last capability this kernel knows.
                Err(super::Errno::EINVAL) => break,
                other => other?,
            };
        }
    }
    Ok(())
}

pub fn clear_ambient_capabilities() {
    const PR_CAP_AMBIENT: u32 = 47;
    let _ = call!(nr::PRCTL, PR_CAP_AMBIENT, 4);
}

/// Sets permitted = effective = `caps` and clears the inheritable set.
pub fn set_capabilities(caps: u64) -> Result<()> {
    let header = [0x2008_0522u32, 0];
    let (low, high) = (caps as u32, (caps >> 32) as u32);
    let data = [low, low, 0, high, high, 0];
    call!(nr::CAPSET, header.as_ptr(), data.as_ptr()).map(drop)
}

pub fn get_rlimit(resource: u32) -> Result<[u64; 2]> {
    let mut old = [0u64; 2];
    call!(nr::PRLIMIT64, 0, resource, 0, old.as_mut_ptr())?;
    Ok(old)
}

pub fn set_rlimit(resource: u32, limit: [u64; 2]) -> Result<()> {
    call!(nr::PRLIMIT64, 0, resource, limit.as_ptr(), 0).map(drop)
}

/// Executes a program; returns only on failure.
///
/// # Safety
/// `argv` and `envp` must end with a null pointer, each other entry pointing to a live C string.
pub unsafe fn execve(path: &CStr, argv: &[*const u8], envp: &[*const u8]) -> super::Errno {
    match call!(nr::EXECVE, path.as_ptr(), argv.as_ptr(), envp.as_ptr()) {
        Err(error) => error,
        Ok(_) => super::Errno::EIO,
    }
}
