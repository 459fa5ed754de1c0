//! `dsec-launch serve`: reads its arguments and serves until told to stop.

use std::process::ExitCode;
use std::sync::Arc;

use dsec_launch::engine::Engine;
use dsec_launch::error::{Error, Result};
use dsec_launch::host;
use dsec_launch::server::Server;

const USAGE: &str =
    "usage: dsec-launch serve --socket PATH --instance ID --cgroup-name NAME --uid-base N \
[--keep-fd FD]... [--workers N]";

#[derive(Debug, Default)]
struct Config {
    socket: String,
    instance: String,
    cgroup_name: String,
    uid_base: u32,
    keep: Vec<i32>,
    workers: usize,
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Config> {
    let usage = || Error::Invalid(USAGE.into());
    if words.next().as_deref() != Some("serve") {
        return Err(usage());
    }
    let cpus = std::thread::available_parallelism().map_or(2, usize::from);
    let mut config = Config {
        workers: cpus.max(2),
        ..Config::default()
    };
    while let Some(option) = words.next() {
        let value = words.next().ok_or_else(usage)?;
        let number = || {
            value
                .parse::<u32>()
                .map_err(|_| Error::Invalid(format!("{option} needs a number, not {value}")))
        };
        match option.as_str() {
            "--socket" => config.socket = value,
            "--instance" => config.instance = value,
            "--cgroup-name" => config.cgroup_name = value,
            "--uid-base" => config.uid_base = number()?,
            "--keep-fd" => config.keep.push(number()? as i32),
            "--workers" => config.workers = number()?.clamp(1, 64) as usize,
            _ => return Err(usage()),
        }
    }
    if config.socket.is_empty()
        || config.instance.is_empty()
        || config.cgroup_name.is_empty()
        || config.uid_base == 0
    {
        return Err(usage());
    }
    Ok(config)
}

/// A terminal's signals are for the programs on it, and a controller's end is no reason to end. SIGTERM keeps its meaning:
/// the launcher ends at once and its sandboxes live on.
fn ignore_terminal() {
    // What our starter ignores must not be ignored in sandboxes.
    for signal in 1..=64 {
        let default = [0u64; 4];
        // SAFETY: a kernel sigaction of zeros means SIG_DFL. The raw call also takes the signals that libc keeps to itself;
        // it refuses SIGKILL and SIGSTOP, which is fine.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                default.as_ptr(),
                0usize,
                8usize,
            )
        };
    }
    for signal in [libc::SIGINT, libc::SIGQUIT, libc::SIGHUP, libc::SIGPIPE] {
        // SAFETY: SIG_IGN needs no handler.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    // SAFETY: plain system call; fails harmlessly for a process that leads its group.
    unsafe { libc::setsid() };
}

fn serve(config: &Config) -> Result<()> {
    let _kept = host::claim_numbers(config.workers, &config.keep)?;
    ignore_terminal();
    let engine = Arc::new(Engine::new(
        &config.cgroup_name,
        config.uid_base,
        config.workers,
    )?);
    Server::new(engine, &config.socket, &config.instance)?.run()
}

fn main() -> ExitCode {
    let done = parse(std::env::args().skip(1)).and_then(|config| serve(&config));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("dsec-launch: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> impl Iterator<Item = String> + '_ {
        text.split_whitespace().map(str::to_owned)
    }

    #[test]
    fn arguments() {
        let text = "serve --socket /s --instance i --cgroup-name c --uid-base 70000 --keep-fd 9 --keep-fd 11";
        let config = parse(words(text)).expect("valid");
        assert_eq!(
            (config.uid_base, config.keep.as_slice()),
            (70_000, &[9, 11][..])
        );
        assert!(config.workers >= 2);
        for bad in [
            "",
            "run",
            "serve --socket",
            "serve --socket /s",
            "serve --uid-base x --socket /s",
        ] {
            assert!(parse(words(bad)).is_err(), "{bad}");
        }
    }
}
