//! Names, resolved beneath the sandbox's root by the kernel.

use crate::reply::{Failure, Outcome};
use crate::sys::consts::*;
use crate::sys::{fs, Errno, Fd, Result};
use alloc::ffi::CString;
use alloc::vec::Vec;

/// Symbolic links followed at most, as in the kernel.
const MAX_LINKS: usize = 40;
const RESOLVE: u64 = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS;

/// The root directory (or, for unit tests and archives, any directory taken as one).
pub struct Root {
    fd: Fd,
    resolve: u64,
}

/// A name in a directory that is held open.
pub struct Place {
    pub dir: Fd,
    pub leaf: CString,
}

pub fn c_path(path: &[u8]) -> Result<CString> {
    CString::new(path).map_err(|_| Errno::EINVAL)
}

/// Splits into parent and last component. The component is empty for the root and for names that
/// end in `.` or `..`.
pub fn split(path: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let mut end = path.len();
    while end > 0 && path[end - 1] == b'/' {
        end -= 1;
    }
    let start = path[..end]
        .iter()
        .rposition(|b| *b == b'/')
        .map_or(0, |at| at + 1);
    let leaf = &path[start..end];
    if matches!(leaf, b"" | b"." | b"..") {
        return (path.to_vec(), Vec::new());
    }
    let parent = if start == 0 {
        b".".to_vec()
    } else {
        path[..start].to_vec()
    };
    (parent, leaf.to_vec())
}

impl Root {
    /// The root of this process.
    pub fn open() -> Outcome<Root> {
        let fd = fs::openat(AT_FDCWD, c"/", O_PATH | O_DIRECTORY, 0)
            .map_err(|e| Failure::kernel(e, "cannot open the root"))?;
        Ok(Root {
            fd,
            resolve: RESOLVE,
        })
    }

    /// Takes `fd` as a directory that no name may leave: what would leave it is EXDEV.
    pub fn beneath(fd: Fd) -> Root {
        Root {
            fd,
            resolve: RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS,
        }
    }

    pub fn raw(&self) -> i32 {
        self.fd.raw()
    }

    pub fn open_path(&self, path: &[u8], flags: u32, mode: u32) -> Result<Fd> {
        fs::openat2(self.fd.raw(), &c_path(path)?, flags, mode, self.resolve)
    }

    pub fn open_dir(&self, path: &[u8]) -> Result<Fd> {
        self.open_path(path, O_PATH | O_DIRECTORY, 0)
    }

    /// The place of a name whose last component is not followed.
    pub fn place(&self, path: &[u8], make_parents: bool) -> Result<Place> {
        let (parent, leaf) = split(path);
        if leaf.is_empty() {
            return Err(Errno::EINVAL);
        }
        let dir = match self.open_dir(&parent) {
            Err(Errno::ENOENT) if make_parents => self.make_dirs(&parent, 0o755)?,
            other => other?,
        };
        Ok(Place {
            dir,
            leaf: c_path(&leaf)?,
        })
    }

    /// The place of what a name finally means: links at its end are followed inside the root.
    pub fn final_place(&self, path: &[u8], make_parents: bool) -> Result<Place> {
        let mut path = path.to_vec();
        for _ in 0..MAX_LINKS {
            let place = self.place(&path, make_parents)?;
            match fs::readlinkat(place.dir.raw(), &place.leaf) {
                Ok(target) if target.first() == Some(&b'/') => path = target,
                Ok(target) => {
                    let (parent, _) = split(&path);
                    path = [parent.as_slice(), b"/", &target].concat();
                }
                Err(Errno::EINVAL | Errno::ENOENT) => return Ok(place),
                Err(error) => return Err(error),
            }
        }
        Err(Errno::ELOOP)
    }

    /// Makes a directory and those above it; opens it.
    pub fn make_dirs(&self, path: &[u8], mode: u32) -> Result<Fd> {
        let mut end = 0;
        while end < path.len() {
            let start = end + path[end..].iter().take_while(|b| **b == b'/').count();
            end = start + path[start..].iter().take_while(|b| **b != b'/').count();
            if start == end || matches!(&path[start..end], b"." | b"..") {
                continue;
            }
            match self.open_dir(&path[..end]) {
                Ok(_) => {}
                Err(Errno::ENOENT) => {
                    let above: &[u8] = if start == 0 { b"." } else { &path[..start] };
                    let dir = self.open_dir(above)?;
                    let last = path[end..].iter().all(|b| *b == b'/');
                    match fs::mkdirat(
                        dir.raw(),
                        &c_path(&path[start..end])?,
                        if last { mode } else { 0o755 },
                    ) {
                        // A link that leads nowhere also "exists"; opening it will tell.
                        Ok(()) | Err(Errno::EEXIST) => {}
                        Err(error) => return Err(error),
                    }
                }
                Err(error) => return Err(error),
            }
        }
        self.open_dir(path)
    }
}

/// A failure about `path`.
pub fn failed<'a>(what: &'a str, path: &'a [u8]) -> impl Fn(Errno) -> Failure + 'a {
    move |errno| {
        Failure::kernel(
            errno,
            &alloc::format!(
                "cannot {what} {}",
                alloc::string::String::from_utf8_lossy(path)
            ),
        )
        .at(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitting() {
        let s = |p: &str| {
            let (a, b) = split(p.as_bytes());
            (String::from_utf8(a).unwrap(), String::from_utf8(b).unwrap())
        };
        assert_eq!(s("/a/b"), ("/a/".into(), "b".into()));
        assert_eq!(s("b"), (".".into(), "b".into()));
        assert_eq!(s("/b//"), ("/".into(), "b".into()));
        for whole in ["/", "//", "/a/..", "a/.", "..", "."] {
            assert_eq!(s(whole), (whole.into(), String::new()));
        }
    }

    #[test]
    fn links_stay_inside_the_root() {
        let base = std::env::temp_dir().join(format!("dsec-path-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&base);
        std::fs::create_dir_all(base.join("in")).unwrap();
        std::os::unix::fs::symlink("/target", base.join("abs")).unwrap();
        std::os::unix::fs::symlink("../../../../in", base.join("up")).unwrap();
        std::os::unix::fs::symlink("loop", base.join("loop")).unwrap();
        std::os::unix::fs::symlink("nowhere/x", base.join("dangling")).unwrap();
        let open = || {
            fs::openat(
                AT_FDCWD,
                &c_path(base.to_str().unwrap().as_bytes()).unwrap(),
                O_PATH | O_DIRECTORY,
                0,
            )
            .unwrap()
        };
        let root = Root {
            fd: open(),
            resolve: RESOLVE,
        };
        assert_eq!(
            root.final_place(b"/abs", false).unwrap().leaf.to_bytes(),
            b"target"
        );
        root.make_dirs(b"up/new/deep", 0o700).unwrap();
        assert!(base.join("in/new/deep").is_dir());
        assert_eq!(root.final_place(b"loop", false).err(), Some(Errno::ELOOP));
        assert_eq!(
            root.final_place(b"dangling", false).err(),
            Some(Errno::ENOENT)
        );
        assert_eq!(
            root.make_dirs(b"dangling", 0o755).err(),
            Some(Errno::ENOENT)
        );
        assert_eq!(root.place(b"a/..", false).err(), Some(Errno::EINVAL));
        let strict = Root::beneath(open());
        assert_eq!(strict.open_dir(b"up").err(), Some(Errno::EXDEV));
        assert_eq!(strict.place(b"up/x", true).err(), Some(Errno::EXDEV));
        std::fs::remove_dir_all(&base).unwrap();
    }
}
