//! clone3 for children that share the launcher's memory. Owns the assembly and the stacks.
//!
//! Such a child costs no page-table copy whatever the launcher's size. The rule a reader could break: code that runs in it
//! must not allocate, lock, panic or return.

use std::ffi::c_void;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use crate::error::{Error, Result};

/// struct clone_args, CLONE_ARGS_SIZE_VER2.
#[repr(C, align(8))]
#[derive(Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

pub const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// A stack for a child, with a guard page below it.
pub struct Stack {
    base: *mut c_void,
}

// SAFETY: the mapping belongs to this value alone; nothing about it is tied to a thread.
unsafe impl Send for Stack {}

const STACK_BYTES: usize = 64 * 1024;
const GUARD_BYTES: usize = 4096;

impl Stack {
    pub fn new() -> Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let size = STACK_BYTES + GUARD_BYTES;
        // SAFETY: a fresh anonymous mapping.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(Error::last("mmap", "child stack"));
        }
        // SAFETY: the first page of the mapping just made.
        unsafe { libc::mprotect(base, GUARD_BYTES, libc::PROT_NONE) };
        Ok(Self { base })
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` and no child runs on it any more.
        unsafe { libc::munmap(self.base, STACK_BYTES + GUARD_BYTES) };
    }
}

/// Starts `entry(arg)` in a child that shares memory and descriptors. `flags` adds namespaces and, with CLONE_VFORK, waits
/// for its exec or end. All signals are blocked in the child when it starts.
///
/// # Safety
/// `entry` keeps the rule of this module, and `arg` stays valid for as long as the child uses it: until this call returns
/// with CLONE_VFORK, else until the child was reaped.
pub unsafe fn clone_vm(
    flags: u64,
    cgroup: Option<RawFd>,
    stack: &mut Stack,
    entry: extern "C" fn(*mut c_void) -> !,
    arg: *mut c_void,
) -> Result<(i32, OwnedFd)> {
    let mut pidfd: RawFd = -1;
    let base = (libc::CLONE_VM | libc::CLONE_FILES | libc::CLONE_PIDFD) as u64;
    let args = CloneArgs {
        flags: flags
            | base
            | if cgroup.is_some() {
                CLONE_INTO_CGROUP
            } else {
                0
            },
        pidfd: &raw mut pidfd as u64,
        exit_signal: libc::SIGCHLD as u64,
        stack: stack.base as u64 + GUARD_BYTES as u64,
        stack_size: STACK_BYTES as u64,
        cgroup: cgroup.unwrap_or(0) as u64,
        ..CloneArgs::default()
    };
    let old = block_signals();
    let result: i64;
    // SAFETY: the child gets a stack of its own and never comes back from the call; the parent sees an ordinary system call.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r13",
            "call r12",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone3 => result,
            in("rdi") &raw const args,
            in("rsi") std::mem::size_of::<CloneArgs>(),
            in("r12") entry,
            in("r13") arg,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    // SAFETY: `old` is a valid set.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &old, std::ptr::null_mut()) };
    if result < 0 {
        return Err(Error::os(
            "clone3",
            "",
            io::Error::from_raw_os_error(-result as i32),
        ));
    }
    // SAFETY: the kernel just stored it.
    Ok((result as i32, unsafe { OwnedFd::from_raw_fd(pidfd) }))
}

/// A handler of the launcher must not run on a child's stack.
fn block_signals() -> libc::sigset_t {
    // SAFETY: sigset_t is plain data; both sets are valid for writing.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut old: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut old);
        old
    }
}
