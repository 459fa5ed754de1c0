//! System calls without libc: numbers and entry per architecture, safe wrappers around them.
//!
//! The one rule: a wrapper is safe only if no argument can make the kernel write outside the memory
//! that the wrapper was given.

#[cfg(target_arch = "x86_64")]
#[path = "x86_64.rs"]
mod arch;
#[cfg(not(target_arch = "x86_64"))]
compile_error!("the guest has no system call layer for this architecture yet");

pub mod consts;
pub mod errno;
pub mod event;
pub mod fs;
pub mod io;
pub mod task;

pub use arch::{nr, syscall6};
pub use errno::Errno;
pub use io::Fd;

pub type Result<T> = core::result::Result<T, Errno>;

/// Turns a raw return value into a result.
#[inline(always)]
pub(crate) fn check(ret: isize) -> Result<usize> {
    if (-4095..0).contains(&ret) {
        Err(Errno(-ret as i32))
    } else {
        Ok(ret as usize)
    }
}

/// A system call whose arguments are all passed by value (no memory is touched) or point to memory
/// that the wrapper using it keeps alive.
macro_rules! call {
    ($n:expr $(, $a:expr)*) => {{
        #[allow(unused_mut, unused_assignments)]
        let mut args = [0usize; 6];
        let mut _i = 0;
        $( args[_i] = $a as usize; _i += 1; )*
        // SAFETY: each use passes plain numbers, or pointers to objects it borrows for the call.
        $crate::sys::check(unsafe { $crate::sys::syscall6($n, args) })
    }};
}
pub(crate) use call;
