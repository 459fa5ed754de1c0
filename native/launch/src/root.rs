//! Composes a sandbox's root file system: idmapped layers, the overlay on them, and the list of what a child mounts on top.
//!
//! All that needs no namespace of the child is done here, on the worker, where errors can be told in full.

use std::collections::HashMap;
use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Error, Result};
use crate::host::Host;
use crate::spec::{Mount, Spec};
use crate::storage::{self, Store};
use crate::sys::{self, raw, FsContext};

/// Mounted layers by name. The mounts are detached: no path on the host leads to them.
#[derive(Default)]
pub struct Layers(Mutex<HashMap<String, Arc<OwnedFd>>>);

impl Layers {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Arc<OwnedFd>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Mounts an EROFS file. A name that is mounted already is left alone: layers are named by digest.
    pub fn add(&self, name: &str, path: &str) -> Result<()> {
        if self.lock().contains_key(name) {
            return Ok(());
        }
        File::open(path).map_err(|e| Error::os("open", path, e))?;
        let context = FsContext::open(c"erofs")?;
        context.string(c"source", path)?;
        let mount = context.mount(sys::MOUNT_ATTR_RDONLY | sys::MOUNT_ATTR_NODEV)?;
        self.lock()
            .entry(name.to_owned())
            .or_insert_with(|| Arc::new(mount));
        Ok(())
    }

    pub fn remove(&self, name: &str) -> Result<()> {
        let mut layers = self.lock();
        match layers.get(name) {
            None => Err(Error::NotFound(format!("no layer {name}"))),
            Some(layer) if Arc::strong_count(layer) > 1 => {
                Err(Error::Busy(format!("a sandbox uses layer {name}")))
            }
            Some(_) => {
                layers.remove(name);
                Ok(())
            }
        }
    }

    pub fn get(&self, names: &[String]) -> Result<Vec<Arc<OwnedFd>>> {
        let layers = self.lock();
        let find = |name: &String| {
            layers
                .get(name)
                .cloned()
                .ok_or_else(|| Error::NotFound(format!("no layer {name}")))
        };
        names.iter().map(find).collect()
    }
}

/// What a child does to its root, in order. Raw numbers belong to descriptors held by the `Root` beside them.
pub enum Step {
    /// Attach a detached mount; a missing mount point is made.
    Attach {
        fd: RawFd,
        path: Vec<u8>,
        directory: bool,
    },
    /// A proc instance of the child's own pid namespace.
    Proc,
    /// Hide a path if it exists: a directory under an empty one, a file under /dev/null.
    Mask { path: Vec<u8> },
    /// Make what lies at a path read-only, if it exists.
    ReadOnly { path: Vec<u8> },
}

pub struct Root {
    pub overlay: OwnedFd,
    /// What the overlay is made of. The child attaches it below the overlay, out of everyone's sight: closing a detached
    /// mount waits for an RCU grace period each, while a namespace's end waits once for all of its mounts.
    pub parts: Vec<RawFd>,
    pub steps: Vec<Step>,
    _held: Vec<OwnedFd>,
}

/// A path as a child wants it: relative to the root, as NUL-terminated bytes that it may cut for a moment.
fn bytes(path: &str) -> Result<Vec<u8>> {
    let path = path.trim_start_matches('/');
    Ok(CString::new(if path.is_empty() { "." } else { path })
        .map_err(|_| Error::Invalid("a path contains NUL".into()))?
        .into_bytes_with_nul())
}

pub fn compose(
    host: &Host,
    spec: &Spec,
    layers: &[Arc<OwnedFd>],
    userns: Option<BorrowedFd>,
    base: u32,
) -> Result<Option<Root>> {
    let Some(upper) = &spec.upper else {
        return Ok(None);
    };
    let store = storage::make(host, upper, &spec.files, userns)?;
    let lowers = layers
        .iter()
        .map(|layer| lower(layer, userns))
        .collect::<Result<Vec<_>>>()?;
    let overlay = overlay(&store, &lowers, userns.map(|_| base))?;
    let mut held = if userns.is_some() { lowers } else { Vec::new() };
    held.push(store.mount);
    let parts = held.iter().map(AsRawFd::as_raw_fd).collect();
    let mut root = Root {
        overlay,
        parts,
        steps: Vec::with_capacity(spec.mounts.len()),
        _held: held,
    };
    for mount in &spec.mounts {
        root.add(host, mount, userns, base)?;
    }
    Ok(Some(root))
}

fn lower(layer: &OwnedFd, userns: Option<BorrowedFd>) -> Result<OwnedFd> {
    if userns.is_none() {
        return sys::dup(layer.as_fd());
    }
    let clone = sys::open_tree(layer.as_fd(), c"")?;
    sys::mount_setattr(clone.as_fd(), 0, userns)?;
    Ok(clone)
}

fn overlay(store: &Store, lowers: &[OwnedFd], fsid: Option<u32>) -> Result<OwnedFd> {
    let upper = sys::openat(store.mount.as_fd(), "u", libc::O_PATH | libc::O_DIRECTORY)?;
    let work = sys::openat(store.mount.as_fd(), "w", libc::O_PATH | libc::O_DIRECTORY)?;
    // The mounter's fsuid must lie in the upper's map, or the overlay is silently read-only.
    raw::setfsid(fsid.unwrap_or(0));
    let mounted = (|| {
        let context = FsContext::open(c"overlay")?;
        for lower in lowers.iter().rev() {
            context.fd(c"lowerdir+", lower.as_fd())?;
        }
        context.fd(c"upperdir", upper.as_fd())?;
        context.fd(c"workdir", work.as_fd())?;
        if store.volatile {
            context.flag(c"volatile")?;
        }
        for (key, value) in [
            (c"redirect_dir", "on"),
            (c"metacopy", "off"),
            (c"index", "off"),
            (c"xino", "off"),
        ] {
            context.string(key, value)?;
        }
        context.mount(sys::MOUNT_ATTR_NODEV)
    })();
    raw::setfsid(0);
    mounted
}

impl Root {
    fn add(
        &mut self,
        host: &Host,
        mount: &Mount,
        userns: Option<BorrowedFd>,
        base: u32,
    ) -> Result<()> {
        match mount {
            Mount::Proc => self.steps.push(Step::Proc),
            Mount::Mask { path } => self.steps.push(Step::Mask { path: bytes(path)? }),
            Mount::Ro { path } => self.steps.push(Step::ReadOnly { path: bytes(path)? }),
            Mount::Dev => {
                let dev = sys::open_tree(host.dev.as_fd(), c"")?;
                let attrs =
                    sys::MOUNT_ATTR_RDONLY | sys::MOUNT_ATTR_NOSUID | sys::MOUNT_ATTR_NOEXEC;
                sys::mount_setattr(dev.as_fd(), attrs, userns)?;
                self.attach(dev, "/dev", true)?;
            }
            Mount::Devpts => self.attach(devpts(base)?, "/dev/pts", true)?,
            Mount::Tmpfs { path, bytes, mode } => {
                self.attach(tmpfs(*bytes, *mode, userns)?, path, true)?
            }
            Mount::Bind { source, path, ro } => {
                let (tree, directory) = bind(host, source, *ro, userns)?;
                self.attach(tree, path, directory)?;
            }
        }
        Ok(())
    }

    fn attach(&mut self, mount: OwnedFd, path: &str, directory: bool) -> Result<()> {
        self.steps.push(Step::Attach {
            fd: mount.as_raw_fd(),
            path: bytes(path)?,
            directory,
        });
        self._held.push(mount);
        Ok(())
    }
}

/// A terminal's owner is whoever opens ptmx, its group `tty` (5) of the sandbox.
fn devpts(base: u32) -> Result<OwnedFd> {
    let context = FsContext::open(c"devpts")?;
    context.string(c"ptmxmode", "0666")?;
    context.string(c"mode", "0620")?;
    context.string(c"gid", &(base + 5).to_string())?;
    context.mount(sys::MOUNT_ATTR_NOSUID | sys::MOUNT_ATTR_NOEXEC)
}

fn tmpfs(bytes: u64, mode: u32, userns: Option<BorrowedFd>) -> Result<OwnedFd> {
    let context = FsContext::open(c"tmpfs")?;
    context.string(c"size", &bytes.to_string())?;
    context.string(c"mode", &format!("{mode:o}"))?;
    let mount = context.mount(sys::MOUNT_ATTR_NOSUID | sys::MOUNT_ATTR_NODEV)?;
    if userns.is_some() {
        sys::mount_setattr(mount.as_fd(), 0, userns)?;
    }
    Ok(mount)
}

/// A clone of a host path's mount can only be made in the host's mount namespace. It is idmapped where its file system can be
/// (sysfs and proc cannot: their files then belong to nobody inside).
fn bind(
    host: &Host,
    source: &str,
    ro: bool,
    userns: Option<BorrowedFd>,
) -> Result<(OwnedFd, bool)> {
    let tree = storage::in_host(host, || {
        let path = sys::open_in_root(host.root.as_fd(), source, libc::O_PATH)?;
        sys::open_tree(path.as_fd(), c"")
    })?;
    let attrs = sys::MOUNT_ATTR_NOSUID
        | sys::MOUNT_ATTR_NODEV
        | if ro { sys::MOUNT_ATTR_RDONLY } else { 0 };
    match sys::mount_setattr(tree.as_fd(), attrs, userns) {
        Err(e) if e.errno() == Some(libc::EINVAL) && userns.is_some() => {
            sys::mount_setattr(tree.as_fd(), attrs, None)?
        }
        done => done?,
    }
    // SAFETY: stat is plain data that fstat fills.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: `stat` is valid for writing.
    if unsafe { libc::fstat(tree.as_raw_fd(), &mut stat) } != 0 {
        return Err(Error::last("fstat", source));
    }
    Ok((tree, stat.st_mode & libc::S_IFMT == libc::S_IFDIR))
}
