//! posix_spawn and wait of a program on the host: what a `run(["true"])` is compared with.

use std::ffi::CString;
use std::time::Instant;

use crate::report::{json, percentile};
use crate::Options;

pub fn run(options: &Options) -> Result<String, String> {
    let n = options.number("n", 500)?.max(1);
    let program =
        CString::new(options.text("program").unwrap_or("/bin/true")).map_err(|e| e.to_string())?;
    // The first ones warm the page cache.
    for _ in 0..10 {
        once(&program)?;
    }
    let mut us = (0..n)
        .map(|_| once(&program))
        .collect::<Result<Vec<_>, _>>()?;
    us.sort_unstable();
    let field = |name: &str, value: f64| (name.to_owned(), value);
    let fields: Vec<_> = [("p10", 10), ("p50", 50), ("p90", 90)]
        .iter()
        .map(|(name, percent)| field(name, percentile(&us, *percent) as f64))
        .collect();
    Ok(json(&[vec![field("n", n as f64)], fields].concat()))
}

/// Microseconds from posix_spawn to the end of wait.
fn once(program: &CString) -> Result<u64, String> {
    let begin = Instant::now();
    let mut pid = 0;
    let argv = [program.as_ptr().cast_mut(), std::ptr::null_mut()];
    let env = [std::ptr::null_mut()];
    // SAFETY: both arrays end with null, the strings with NUL, and null attributes mean the defaults.
    let error = unsafe {
        libc::posix_spawn(
            &mut pid,
            program.as_ptr(),
            std::ptr::null(),
            std::ptr::null(),
            argv.as_ptr(),
            env.as_ptr(),
        )
    };
    if error != 0 {
        return Err(format!(
            "posix_spawn {program:?}: {}",
            std::io::Error::from_raw_os_error(error)
        ));
    }
    let mut status = 0;
    // SAFETY: `status` is valid for writing.
    if unsafe { libc::waitpid(pid, &mut status, 0) } != pid || status != 0 {
        return Err(format!("{program:?} ended with wait status {status}"));
    }
    Ok(begin.elapsed().as_micros() as u64)
}
