//! The program: entry point, memory routines and panic handler around the library's agent.
#![no_std]
#![no_main]

use core::arch::{asm, global_asm};
use dsec_guest::heap::PageAlloc;

#[global_allocator]
static HEAP: PageAlloc = PageAlloc::new();

#[cfg(target_arch = "x86_64")]
global_asm!(
    ".globl _start",
    "_start:",
    "xor %ebp, %ebp",
    "mov %rsp, %rdi",
    "and $-16, %rsp",
    "call {entry}",
    "ud2",
    entry = sym entry,
    options(att_syntax)
);

/// Called with the stack as the kernel left it: argc, argv, null, envp, null.
unsafe extern "C" fn entry(stack: *const usize) -> ! {
    // SAFETY: the kernel put argc and so many pointers to C strings there.
    let (count, first) = unsafe { (*stack, stack.add(1).cast::<*const core::ffi::c_char>()) };
    let mut words = dsec_guest::start::Words::new();
    for i in 1..count {
        // SAFETY: i < argc, and each word is a C string that lives as long as the process.
        words.push(unsafe { core::ffi::CStr::from_ptr(*first.add(i)) }.to_bytes());
    }
    dsec_guest::start::run(&words)
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    dsec_guest::start::panicked(info)
}

/// The prebuilt core names it; nothing unwinds in this program.
#[no_mangle]
extern "C" fn rust_eh_personality() {}

/// As above.
#[no_mangle]
extern "C" fn _Unwind_Resume() -> ! {
    dsec_guest::sys::task::exit(70)
}

// The compiler calls these by name. String instructions keep the compiler from turning a loop in
// here into a call of itself.

/// # Safety
/// As C's memcpy.
#[no_mangle]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, n: usize) -> *mut u8 {
    // SAFETY: by contract both ranges are valid.
    unsafe {
        asm!("rep movsb", inout("rcx") n => _, inout("rdi") to => _, inout("rsi") from => _, options(nostack, preserves_flags))
    };
    to
}

/// # Safety
/// As C's memmove.
#[no_mangle]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, n: usize) -> *mut u8 {
    if (to as usize).wrapping_sub(from as usize) >= n {
        // SAFETY: copying upwards overwrites only what was read already.
        return unsafe { memcpy(to, from, n) };
    }
    // SAFETY: as above, downwards; the direction flag is cleared again.
    unsafe {
        asm!("std", "rep movsb", "cld", inout("rcx") n => _, inout("rdi") to.wrapping_add(n).wrapping_sub(1) => _,
            inout("rsi") from.wrapping_add(n).wrapping_sub(1) => _, options(nostack));
    }
    to
}

/// # Safety
/// As C's memset.
#[no_mangle]
unsafe extern "C" fn memset(to: *mut u8, byte: i32, n: usize) -> *mut u8 {
    // SAFETY: by contract the range is valid.
    unsafe {
        asm!("rep stosb", inout("rcx") n => _, inout("rdi") to => _, in("al") byte as u8, options(nostack, preserves_flags))
    };
    to
}

/// # Safety
/// As C's memcmp.
#[no_mangle]
unsafe extern "C" fn memcmp(a: *const u8, b: *const u8, n: usize) -> i32 {
    let mut i = 0;
    while i < n {
        // SAFETY: i < n, both ranges are valid by contract; volatile keeps this loop a loop.
        let (x, y) = unsafe { (a.add(i).read_volatile(), b.add(i).read_volatile()) };
        if x != y {
            return i32::from(x) - i32::from(y);
        }
        i += 1;
    }
    0
}

/// # Safety
/// As C's bcmp.
#[no_mangle]
unsafe extern "C" fn bcmp(a: *const u8, b: *const u8, n: usize) -> i32 {
    // SAFETY: same contract.
    unsafe { memcmp(a, b, n) }
}

/// # Safety
/// As C's strlen.
#[no_mangle]
unsafe extern "C" fn strlen(s: *const u8) -> usize {
    let mut n = 0;
    // SAFETY: the string ends with a zero byte by contract.
    while unsafe { s.add(n).read_volatile() } != 0 {
        n += 1;
    }
    n
}
