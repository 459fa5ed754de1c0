//! The child's side of a start: from the fork to the exec.
//!
//! Everything here happens in the forked child. The agent never waits for it: what goes wrong is told
//! through a close-on-exec pipe. After `join_user_namespace` root in the sandbox may signal or stop
//! this process, but not read it (it is not dumpable).

use super::request::{ExecRequest, Program};
use crate::config::Config;
use crate::sys::consts::*;
use crate::sys::{event, fs, io, task, Errno, Fd};
use crate::users::{self, Identity};
use alloc::ffi::CString;
use alloc::string::String;
use alloc::vec::Vec;
use core::ffi::CStr;

const DEFAULT_PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Descriptors and numbers that each child needs.
pub struct Surroundings {
    pub userns: Option<Fd>,
    pub proc_dir: Option<Fd>,
    pub own_nofile: [u64; 2],
}

/// Where a start failed; the number goes through the status pipe.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Step {
    Cgroup = 1,
    Namespace,
    User,
    Identity,
    Cwd,
    Stdio,
    Exec,
    /// The file is there, but cannot be executed for a reason other than permission.
    Interpreter,
}

impl Step {
    pub fn from_byte(byte: u8) -> Option<Step> {
        use Step::*;
        [
            Cgroup,
            Namespace,
            User,
            Identity,
            Cwd,
            Stdio,
            Exec,
            Interpreter,
        ]
        .into_iter()
        .find(|s| *s as u8 == byte)
    }
}

/// What goes through the status pipe: the step, the error number, a sentence.
pub struct Broken(pub Step, pub Errno, pub String);

impl Broken {
    fn new(step: Step, errno: Errno) -> Broken {
        Broken(step, errno, String::new())
    }
}

/// Pipe ends and cgroup files of one start.
pub struct Ends {
    pub stdin: Option<i32>,
    pub stdout: i32,
    pub stderr: i32,
    pub status: i32,
    /// `cgroup.procs` of the run's cgroup2 leaf and `tasks` of its v1 pids leaf.
    pub procs: Option<i32>,
    pub tasks: Option<i32>,
}

/// Never returns: executes the program or reports and exits.
pub fn run(request: &ExecRequest, config: &Config, around: &Surroundings, ends: &Ends) -> ! {
    let Broken(step, errno, text) = match prepare(request, config, around, ends) {
        Ok(Ready { env, .. }) => exec(request, &env),
        Err(broken) => broken,
    };
    let mut report = Vec::with_capacity(256);
    report.push(step as u8);
    report.extend_from_slice(&errno.0.to_le_bytes());
    report.extend_from_slice(&text.as_bytes()[..text.len().min(240)]);
    let _ = io::write(ends.status, &report);
    task::exit(127)
}

struct Ready {
    env: Vec<CString>,
}

fn prepare(
    request: &ExecRequest,
    config: &Config,
    around: &Surroundings,
    ends: &Ends,
) -> Result<Ready, Broken> {
    task::setsid();
    event::set_signal_mask(0);
    for file in [ends.procs, ends.tasks].into_iter().flatten() {
        io::write(file, b"0").map_err(|e| Broken::new(Step::Cgroup, e))?;
    }
    set_oom_score(around, config.oom_score_adj);
    let nofile = config.nofile.unwrap_or(around.own_nofile);
    // Raising the hard limit needs a privilege that the agent has not.
    let hard = nofile[1].min(around.own_nofile[1]);
    let _ = task::set_rlimit(RLIMIT_NOFILE, [nofile[0].min(hard), hard]);
    let user = request.user.as_deref().or(config.user.as_deref());
    let identity = become_user(user, around.userns.as_ref(), config.keep_caps, true)?;
    task::umask(0o022);
    let cwd = request
        .cwd
        .as_deref()
        .or(config.cwd.as_deref())
        .unwrap_or(b"/");
    let path = CString::new(cwd).map_err(|_| Broken::new(Step::Cwd, Errno::EINVAL))?;
    task::chdir(&path)
        .map_err(|e| Broken(Step::Cwd, e, String::from_utf8_lossy(cwd).into_owned()))?;
    set_stdio(ends).map_err(|e| Broken::new(Step::Stdio, e))?;
    Ok(Ready {
        env: environment(request, config, &identity),
    })
}

/// The OOM killer shall take commands before the agent. `/proc/self` of a process that is not dumpable
/// belongs to the host's root, hence the moment of dumpability; it is before the namespace is joined,
/// so nobody in the sandbox can use it.
pub fn set_oom_score(around: &Surroundings, adj: i64) {
    let Some(proc_dir) = &around.proc_dir else {
        return;
    };
    task::set_dumpable(true);
    if let Ok(file) = fs::openat(proc_dir.raw(), c"self/oom_score_adj", O_WRONLY, 0) {
        let _ = io::write(file.raw(), alloc::format!("{adj}").as_bytes());
    }
    task::set_dumpable(false);
}

/// Joins the sandbox's user namespace and takes the user's identity. With `for_exec` the bounding set
/// is limited; without, root keeps the same capabilities as an effective set.
pub fn become_user(
    user: Option<&str>,
    userns: Option<&Fd>,
    keep_caps: u64,
    for_exec: bool,
) -> Result<Identity, Broken> {
    if let Some(userns) = userns {
        task::join_user_namespace(userns.raw()).map_err(|e| Broken::new(Step::Namespace, e))?;
    }
    let identity =
        lookup(user.unwrap_or("0")).map_err(|text| Broken(Step::User, Errno::ENOENT, text))?;
    let failed = |e| Broken::new(Step::Identity, e);
    if for_exec {
        task::limit_bounding_set(keep_caps).map_err(failed)?;
    }
    task::clear_ambient_capabilities();
    task::set_groups(&identity.groups).map_err(failed)?;
    task::set_gid(identity.gid).map_err(failed)?;
    task::set_uid(identity.uid).map_err(failed)?;
    // Joining the namespace gave all capabilities. The kernel drops them only on a change from root's
    // uid, and the agent's is another: without this, a file child of any user would act as root.
    let caps = if identity.uid == 0 {
        keep_caps & 0x1ff_ffff_ffff
    } else {
        0
    };
    task::set_capabilities(caps).map_err(failed)?;
    task::set_dumpable(false);
    Ok(identity)
}

/// Resolves a user with the sandbox's files, read as the sandbox's root.
pub fn lookup(user: &str) -> Result<Identity, String> {
    users::resolve(
        user,
        &small_file(c"/etc/passwd"),
        &small_file(c"/etc/group"),
    )
}

/// A regular file's start; empty if there is none. Never waits for a fifo or a device.
fn small_file(path: &CStr) -> Vec<u8> {
    let mut out = Vec::new();
    let Ok(file) = fs::openat2(
        AT_FDCWD,
        path,
        O_RDONLY | O_NONBLOCK | O_NOCTTY,
        0,
        RESOLVE_NO_MAGICLINKS,
    ) else {
        return out;
    };
    let regular = fs::fstat(file.raw()).is_ok_and(|stat| stat.is_regular());
    while regular && out.len() < users::MAX_FILE {
        out.reserve(4096);
        match io::read_into(file.raw(), &mut out, usize::MAX) {
            Ok(0) | Err(_) => break,
            Ok(_) => {}
        }
    }
    out
}

/// Puts the pipe ends at 0, 1 and 2; everything else is closed by the exec.
fn set_stdio(ends: &Ends) -> Result<(), Errno> {
    match ends.stdin {
        Some(fd) => io::dup_to(fd, 0)?,
        None => io::dup_to(
            fs::openat(AT_FDCWD, c"/dev/null", O_RDWR | O_NOCTTY, 0)?.raw(),
            0,
        )?,
    }
    io::dup_to(ends.stdout, 1)?;
    io::dup_to(ends.stderr, 2)?;
    io::cloexec_from(3)
}

fn environment(request: &ExecRequest, config: &Config, identity: &Identity) -> Vec<CString> {
    let mut vars: Vec<(&[u8], &[u8])> = Vec::new();
    let defaults: [(&[u8], &[u8]); 4] = [
        (b"HOME", &identity.home),
        (b"USER", &identity.name),
        (b"LOGNAME", &identity.name),
        (b"PATH", DEFAULT_PATH),
    ];
    let given = config
        .env
        .iter()
        .chain(&request.env)
        .map(|(k, v)| (k.as_slice(), v.as_slice()));
    for (key, value) in given {
        match vars.iter_mut().find(|(k, _)| *k == key) {
            Some(var) => var.1 = value,
            None => vars.push((key, value)),
        }
    }
    for (key, value) in defaults {
        if !vars.iter().any(|(k, _)| *k == key) {
            vars.push((key, value));
        }
    }
    vars.iter()
        .filter_map(|(k, v)| CString::new([k, b"=".as_slice(), v].concat()).ok())
        .collect()
}

fn pointers(words: &[CString]) -> Vec<*const u8> {
    words
        .iter()
        .map(|w| w.as_ptr().cast())
        .chain([core::ptr::null()])
        .collect()
}

fn exec(request: &ExecRequest, env: &[CString]) -> Broken {
    match &request.program {
        Program::Shell(text) => exec_shell(text, env),
        Program::Argv(argv) => {
            let words: Vec<CString> = argv
                .iter()
                .filter_map(|w| CString::new(w.as_slice()).ok())
                .collect();
            let name = words[0].clone();
            let path = env
                .iter()
                .find_map(|v| v.to_bytes().strip_prefix(b"PATH="))
                .unwrap_or(DEFAULT_PATH);
            search(&name, path, &words, env)
        }
    }
}

fn exec_shell(text: &[u8], env: &[CString]) -> Broken {
    let Ok(script) = CString::new(text) else {
        return Broken::new(Step::Exec, Errno::EINVAL);
    };
    let mut last = Broken::new(Step::Exec, Errno::ENOENT);
    for shell in [c"/bin/bash", c"/bin/sh"] {
        let words = [CString::from(shell), CString::from(c"-c"), script.clone()];
        last = attempt(shell, &words, env);
        let missing = last.1 == Errno::ENOENT && last.0 == Step::Exec;
        if !missing {
            return last;
        }
    }
    last
}

/// As execvp: through PATH unless the name has a slash.
fn search(name: &CStr, path: &[u8], words: &[CString], env: &[CString]) -> Broken {
    if name.to_bytes().is_empty() || name.to_bytes().contains(&b'/') {
        return attempt(name, words, env);
    }
    let named = String::from_utf8_lossy(name.to_bytes()).into_owned();
    let mut result = Broken(Step::Exec, Errno::ENOENT, named);
    for dir in path.split(|b| *b == b':') {
        let dir = if dir.is_empty() { b"." } else { dir };
        let Ok(full) = CString::new([dir, b"/", name.to_bytes()].concat()) else {
            continue;
        };
        let broken = attempt(&full, words, env);
        match (broken.0, broken.1) {
            (Step::Exec, Errno::ENOENT | Errno::ENOTDIR | Errno::ENAMETOOLONG) => {}
            (Step::Exec, Errno::EACCES) => result = broken,
            _ => return broken,
        }
    }
    result
}

/// One execve; a file without a known format is given to /bin/sh as execvp does.
fn attempt(path: &CStr, words: &[CString], env: &[CString]) -> Broken {
    let (argv, envp) = (pointers(words), pointers(env));
    // SAFETY: both lists end with null and point into `words` and `env`, which live on.
    let errno = unsafe { task::execve(path, &argv, &envp) };
    let errno = match errno {
        Errno::ENOEXEC => {
            let mut script = alloc::vec![CString::from(c"/bin/sh"), CString::from(path)];
            script.extend(words.iter().skip(1).cloned());
            let argv = pointers(&script);
            // SAFETY: as above.
            unsafe { task::execve(c"/bin/sh", &argv, &envp) };
            Errno::ENOEXEC
        }
        other => other,
    };
    // ENOENT for a file that exists means that its interpreter is missing.
    let exists = errno == Errno::ENOENT && fs::statat(AT_FDCWD, path, 0).is_ok();
    let step = if exists {
        Step::Interpreter
    } else {
        Step::Exec
    };
    Broken(
        step,
        errno,
        String::from_utf8_lossy(path.to_bytes()).into_owned(),
    )
}
