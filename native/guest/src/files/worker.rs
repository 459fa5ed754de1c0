//! The forked child that does one file operation and exits.

use super::ops;
use super::path::Root;
use super::port::Port;
use super::request::{FileRequest, Op};
use super::{tree, write};
use crate::config::Config;
use crate::process::child::{become_user, set_oom_score, Broken, Step, Surroundings};
use crate::reply::{Failure, Outcome};
use crate::sys::{event, io, task};
use alloc::vec::Vec;
use dsec_wire::frame;

/// Never returns.
pub fn run(sock: i32, request: &FileRequest, config: &Config, around: &Surroundings) -> ! {
    event::set_signal_mask(0);
    let mut port = Port::new(sock);
    match perform(&mut port, sock, request, config, around) {
        Ok(answer) => port.send(frame::MSG | frame::FIN, &answer),
        Err(failure) => port.send(frame::RESET, &failure.encode()),
    }
    task::exit(0)
}

fn perform(
    port: &mut Port,
    sock: i32,
    request: &FileRequest,
    config: &Config,
    around: &Surroundings,
) -> Outcome<Vec<u8>> {
    set_oom_score(around, config.oom_score_adj);
    let user = request.user.as_deref().or(config.user.as_deref());
    become_user(user, around.userns.as_ref(), config.keep_caps, false).map_err(
        |Broken(step, errno, text)| match step {
            Step::User => Failure::new("not_found", text),
            _ => Failure::kernel(errno, "cannot take the user's identity").coded("internal"),
        },
    )?;
    // A copy of another command's pipe in here would keep that pipe from ending. The agent's own
    // `Fd` values in this process are never dropped: it ends by exit.
    let _ = io::close_between(3, sock as u32 - 1);
    let _ = io::close_between(sock as u32 + 1, u32::MAX);
    task::umask(0o022);
    let root = Root::open()?;
    match request.op {
        Op::Read => ops::read(port, &root, request),
        Op::Write => write::write(port, &root, request),
        Op::Stat => ops::stat(&root, request),
        Op::List => tree::list(port, &root, request),
        Op::Mkdir => ops::mkdir(&root, request),
        Op::Remove => tree::remove(&root, request),
        Op::Move => ops::rename(&root, request),
        Op::Chmod => ops::chmod(&root, request),
        Op::Chown => ops::chown(&root, request),
        Op::TarGet => super::tar::get::tar_get(port, &root, request),
        Op::TarPut => super::tar::put::tar_put(port, &root, request),
    }
}
