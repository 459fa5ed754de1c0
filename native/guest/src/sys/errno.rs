//! Error numbers and the protocol's codes for them.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Errno(pub i32);

macro_rules! errnos {
    ($($name:ident = $n:expr;)*) => { impl Errno { $(pub const $name: Errno = Errno($n);)* } };
}

errnos! {
    EPERM = 1; ENOENT = 2; ESRCH = 3; EINTR = 4; EIO = 5; ENXIO = 6; E2BIG = 7; ENOEXEC = 8;
    EBADF = 9; ECHILD = 10; EAGAIN = 11; ENOMEM = 12; EACCES = 13; EBUSY = 16; EEXIST = 17;
    EXDEV = 18; ENOTDIR = 20; EISDIR = 21; EINVAL = 22; ENFILE = 23; EMFILE = 24; ETXTBSY = 26;
    EFBIG = 27; ENOSPC = 28; EROFS = 30; EPIPE = 32; ENAMETOOLONG = 36; ENOSYS = 38;
    ENOTEMPTY = 39; ELOOP = 40; EOVERFLOW = 75; EOPNOTSUPP = 95; ECONNRESET = 104; EDQUOT = 122;
}

impl Errno {
    /// The code that a RESET carries for this error.
    pub fn code(self) -> &'static str {
        match self {
            Errno::ENOENT => "not_found",
            Errno::EPERM | Errno::EACCES | Errno::EROFS => "permission",
            Errno::EISDIR => "is_directory",
            Errno::ENOTDIR => "not_directory",
            Errno::EEXIST => "exists",
            Errno::ENOSPC | Errno::EDQUOT | Errno::EFBIG => "no_space",
            Errno::ENOTEMPTY => "not_empty",
            Errno::ELOOP => "loop",
            Errno::ENAMETOOLONG => "name_too_long",
            Errno::EINVAL | Errno::E2BIG | Errno::EXDEV | Errno::EOVERFLOW => "invalid",
            Errno::EBUSY | Errno::ETXTBSY => "busy",
            Errno::ESRCH => "no_process",
            Errno::EAGAIN | Errno::EMFILE | Errno::ENFILE => "too_many",
            Errno::ENXIO => "not_regular",
            Errno::EOPNOTSUPP | Errno::ENOSYS => "unsupported",
            _ => "io",
        }
    }

    /// A few words for people.
    pub fn text(self) -> &'static str {
        match self {
            Errno::ENOENT => "no such file or directory",
            Errno::EPERM => "operation not permitted",
            Errno::EACCES => "permission denied",
            Errno::EROFS => "read-only file system",
            Errno::EISDIR => "is a directory",
            Errno::ENOTDIR => "not a directory",
            Errno::EEXIST => "exists already",
            Errno::ENOSPC => "no space left",
            Errno::EDQUOT => "disk quota exceeded",
            Errno::EFBIG => "file too large",
            Errno::ENOTEMPTY => "directory not empty",
            Errno::ELOOP => "too many symbolic links",
            Errno::ENAMETOOLONG => "name too long",
            Errno::E2BIG => "argument list or environment too long",
            Errno::EBUSY => "busy",
            Errno::ETXTBSY => "text file busy",
            Errno::ESRCH => "no such process",
            Errno::EAGAIN => "resource temporarily unavailable",
            Errno::ENOMEM => "out of memory",
            Errno::ENOEXEC => "exec format error",
            Errno::EINVAL => "invalid argument",
            Errno::EXDEV => "leaves the file system or the root",
            Errno::EMFILE | Errno::ENFILE => "too many open files",
            Errno::ENXIO => "not a regular file",
            Errno::EIO => "input/output error",
            Errno::ENOSYS | Errno::EOPNOTSUPP => "not supported",
            _ => "system call failed",
        }
    }
}
