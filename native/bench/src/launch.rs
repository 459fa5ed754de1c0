//! The bare create-and-destroy loop over the launcher's own code: no socket, no Python.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dsec_launch::engine::{Engine, Sandbox, Worker, PHASES};
use dsec_launch::host;
use dsec_launch::msg::{encode, map};
use dsec_launch::packet::{self, Received};
use dsec_launch::spec::{FdName, Limits, Mount, Namespaces, Spec, Upper};
use dsec_launch::sys;

use crate::report::{json, percentile};
use crate::Options;

/// First of the ids used; far from the blocks that daemons take.
const UID_BASE: u32 = 2_000_000_000;
const READY: Duration = Duration::from_secs(10);

#[derive(Default)]
struct Samples {
    ready_us: Vec<u64>,
    end_us: Vec<u64>,
    phases: [u64; PHASES.len()],
}

pub fn run(options: &Options) -> Result<String, String> {
    let workers = options.number("workers", 4)?.clamp(1, 64) as usize;
    let alive = options.number("alive", 64)?.max(workers as u64) as usize;
    let time = Duration::from_secs(options.number("seconds", 5)?);
    let standing = options.number("standing", 0)? as usize;
    let spec = Arc::new(spec(options)?);
    host::claim_numbers(workers, &[]).map_err(|e| e.to_string())?;
    let name = format!("dsecbench-{}", std::process::id());
    let engine = Arc::new(Engine::new(&name, UID_BASE, workers).map_err(|e| e.to_string())?);
    engine
        .layers
        .add("base", options.need("layer")?)
        .map_err(|e| e.to_string())?;
    let result = measure(&engine, &spec, workers, alive, standing, time);
    engine.close();
    let (samples, elapsed) = result?;
    Ok(report(samples, elapsed, &engine))
}

fn measure(
    engine: &Arc<Engine>,
    spec: &Arc<Spec>,
    workers: usize,
    alive: usize,
    standing: usize,
    time: Duration,
) -> Result<(Samples, Duration), String> {
    let filler = {
        let engine = engine.clone();
        std::thread::spawn(move || {
            if dsec_launch::engine::keep_capabilities().is_ok() {
                engine.slots.run_filler(&engine.host, &engine.cgroups);
            }
        })
    };
    let shared = Arc::new(Shared {
        living: Mutex::default(),
        standing: Mutex::default(),
        left: AtomicUsize::new(standing),
        ready: Barrier::new(workers),
    });
    let threads: Vec<_> = (0..workers)
        .map(|number| {
            let (engine, spec, shared) = (engine.clone(), spec.clone(), shared.clone());
            std::thread::spawn(move || shared.work(&engine, &spec, number, alive - workers, time))
        })
        .collect();
    let mut samples = Samples::default();
    let mut elapsed = Duration::ZERO;
    let mut failure = None;
    for thread in threads {
        match thread
            .join()
            .map_err(|_| "a worker died".to_owned())
            .and_then(|r| r)
        {
            Ok((part, took)) => {
                samples.ready_us.extend(part.ready_us);
                samples.end_us.extend(part.end_us);
                (0..PHASES.len()).for_each(|i| samples.phases[i] += part.phases[i]);
                elapsed = elapsed.max(took);
            }
            Err(text) => failure = Some(text),
        }
    }
    let rest: Vec<Sandbox> = shared.take_all();
    for sandbox in rest {
        engine.end(sandbox).map_err(|e| e.to_string())?;
    }
    engine.slots.close(&engine.cgroups);
    let _ = filler.join();
    failure.map_or(Ok((samples, elapsed)), Err)
}

struct Shared {
    living: Mutex<VecDeque<Sandbox>>,
    standing: Mutex<Vec<Sandbox>>,
    left: AtomicUsize,
    ready: Barrier,
}

impl Shared {
    fn work(
        &self,
        engine: &Arc<Engine>,
        spec: &Spec,
        number: usize,
        keep: usize,
        time: Duration,
    ) -> Result<(Samples, Duration), String> {
        let worker = Worker::enter(engine.clone(), number).map_err(|e| e.to_string());
        let stood = worker.and_then(|mut worker| self.stand(spec, &mut worker).map(|()| worker));
        // Also after a failure: the others wait for everybody.
        self.ready.wait();
        let mut worker = stood?;
        let mut samples = Samples::default();
        let begin = Instant::now();
        while begin.elapsed() < time {
            let start = Instant::now();
            let sandbox = ready(&mut worker, spec)?;
            samples.ready_us.push(start.elapsed().as_micros() as u64);
            (0..PHASES.len()).for_each(|i| samples.phases[i] += sandbox.us[i]);
            if let Some(old) = self.swap(sandbox, keep) {
                let start = Instant::now();
                engine.end(old).map_err(|e| e.to_string())?;
                samples.end_us.push(start.elapsed().as_micros() as u64);
            }
        }
        // What still lives was created but not destroyed inside the window; its share is at most `alive`.
        Ok((samples, begin.elapsed()))
    }

    fn stand(&self, spec: &Spec, worker: &mut Worker) -> Result<(), String> {
        while self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1))
            .is_ok()
        {
            let sandbox = ready(worker, spec)?;
            self.standing
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(sandbox);
        }
        Ok(())
    }

    /// Adds the new one; gives the oldest where there are too many.
    fn swap(&self, new: Sandbox, keep: usize) -> Option<Sandbox> {
        let mut living = self.living.lock().unwrap_or_else(PoisonError::into_inner);
        living.push_back(new);
        if living.len() > keep {
            living.pop_front()
        } else {
            None
        }
    }

    fn take_all(&self) -> Vec<Sandbox> {
        let mut all =
            std::mem::take(&mut *self.standing.lock().unwrap_or_else(PoisonError::into_inner));
        all.extend(std::mem::take(
            &mut *self.living.lock().unwrap_or_else(PoisonError::into_inner),
        ));
        all
    }
}

/// Starts one and waits until its guest answered.
fn ready(worker: &mut Worker, spec: &Spec) -> Result<Sandbox, String> {
    let sandbox = worker.start(spec).map_err(|e| e.to_string())?;
    let Some(channel) = &sandbox.channel else {
        return Err("no channel".into());
    };
    if !sys::poll_in(channel.as_fd(), Some(READY)) {
        return Err("a guest did not answer in time".into());
    }
    match packet::receive(channel.as_fd(), &mut [0; 4096]) {
        Received::Packet(..) => Ok(sandbox),
        _ => Err("a guest ended before it was ready".into()),
    }
}

/// CPU time of this process and of the sandboxes it reaped: unlike the rate, it tells something on a busy machine too.
fn cpu_us() -> f64 {
    let time = |who| {
        // SAFETY: rusage is plain data that getrusage fills.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: `usage` is valid for writing.
        unsafe { libc::getrusage(who, &mut usage) };
        let us = |t: libc::timeval| t.tv_sec as f64 * 1e6 + t.tv_usec as f64;
        us(usage.ru_utime) + us(usage.ru_stime)
    };
    time(libc::RUSAGE_SELF) + time(libc::RUSAGE_CHILDREN)
}

fn report(mut samples: Samples, elapsed: Duration, engine: &Engine) -> String {
    samples.ready_us.sort_unstable();
    samples.end_us.sort_unstable();
    let n = samples.ready_us.len().max(1) as f64;
    let mut fields = vec![
        (
            "rate".to_owned(),
            (samples.ready_us.len() as f64 / elapsed.as_secs_f64() * 10.0).round() / 10.0,
        ),
        ("n".to_owned(), samples.ready_us.len() as f64),
    ];
    for percent in [10, 50, 90] {
        fields.push((
            format!("p{percent}"),
            percentile(&samples.ready_us, percent) as f64,
        ));
    }
    fields.push(("cpu_us".to_owned(), (cpu_us() / n).round()));
    fields.push(("end_us".to_owned(), percentile(&samples.end_us, 50) as f64));
    for (name, total) in PHASES.iter().zip(samples.phases) {
        fields.push((format!("{name}_us"), (total as f64 / n).round()));
    }
    let stats = engine.slots.stats();
    fields.push(("slots_made".to_owned(), stats.made as f64));
    fields.push(("slots_reused".to_owned(), stats.reused as f64));
    fields.push(("slots_renewed".to_owned(), stats.renewed as f64));
    json(&fields)
}

/// The launcher takes paths from the host's root only.
fn absolute(path: &str) -> Result<String, String> {
    let path = std::fs::canonicalize(path).map_err(|e| format!("{path}: {e}"))?;
    Ok(path.to_string_lossy().into_owned())
}

fn spec(options: &Options) -> Result<Spec, String> {
    const MIB: u64 = 1 << 20;
    let upper = match options.text("upper").unwrap_or("tmpfs") {
        "tmpfs" => Upper::Tmpfs {
            bytes: 64 * MIB,
            inodes: 16_384,
        },
        "image" => Upper::Image {
            template: absolute(options.need("template")?)?,
            dir: absolute(options.need("dir")?)?,
            bytes: 0,
            volatile: true,
        },
        kind => return Err(format!("--upper {kind} is neither tmpfs nor image")),
    };
    let hello = encode(vec![
        ("proto", 1.into()),
        ("epoch", 1.into()),
        ("config", map(vec![])),
    ]);
    // One frame of the guest protocol: length, stream 0, type HELLO, payload.
    let mut first = (5 + hello.len() as u32).to_le_bytes().to_vec();
    first.extend([0; 5]);
    first.extend(hello);
    Ok(Spec {
        id: "bench".into(),
        tag: Vec::new(),
        project: "bench".into(),
        net_admin: false,
        exe: Some(absolute(options.need("guest")?)?),
        argv: [
            "dsec-guest",
            "channel=%channel",
            "userns=%userns",
            "runs=%runs",
            "pids=%pids",
            "oom=%oom",
        ]
        .iter()
        .map(|w| w.as_bytes().to_vec())
        .collect(),
        env: Vec::new(),
        ns: Namespaces {
            pid: true,
            mnt: true,
            net: true,
            ipc: true,
            uts: true,
            cgroup: true,
            user: true,
        },
        identity: None,
        caps: 0,
        layers: vec!["base".into()],
        upper: Some(upper),
        mounts: mounts(),
        files: Vec::new(),
        hostname: Some("sandbox".into()),
        limits: Limits {
            memory: Some(256 * MIB),
            cpu_quota_us: Some(100_000),
            cpu_period_us: Some(100_000),
            cpu_shares: Some(512),
            pids: Some(512),
        },
        fds: vec![
            FdName::Channel,
            FdName::Userns,
            FdName::Runs,
            FdName::Pids,
            FdName::Oom,
        ],
        affinity: 0,
        seccomp: options.text("seccomp").map(absolute).transpose()?,
        rlimits: Vec::new(),
        first,
        ready_ms: 10_000,
    })
}

/// What a container gets by default (see the edge's container backend).
fn mounts() -> Vec<Mount> {
    let mut mounts = vec![
        Mount::Proc,
        Mount::Dev,
        Mount::Devpts,
        Mount::Tmpfs {
            path: "/dev/shm".into(),
            bytes: 64 << 20,
            mode: 0o1777,
        },
    ];
    let masked = ["/proc/acpi", "/proc/interrupts", "/proc/keys"];
    mounts.extend(masked.map(|path| Mount::Mask { path: path.into() }));
    mounts.push(Mount::Ro {
        path: "/proc/sys".into(),
    });
    mounts
}
