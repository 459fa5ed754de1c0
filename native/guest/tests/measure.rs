//! Figures that belong to the guest. Run with `--ignored --nocapture` on a release build.

mod support;
use std::process::Command;
use std::time::Instant;
use support::{words, Guest};

fn p50(mut samples: Vec<u64>) -> u64 {
    samples.sort_unstable();
    samples[samples.len() / 2]
}

#[test]
#[ignore = "prints figures; needs a quiet machine and a release build"]
fn figures() {
    let hellos: Vec<u64> = (0..50).map(|_| Guest::start().hello_us).collect();
    let mut guest = Guest::start();
    let hello = guest.hello.clone();
    let boot = dsec_wire::Value::decode(&hello).unwrap();
    println!(
        "start to HELLO p50 {} us, own boot_us {:?}",
        p50(hellos),
        boot.get("boot_us")
    );
    println!(
        "idle VmRSS {} KiB, RssAnon {} KiB",
        guest.status_kib("VmRSS"),
        guest.status_kib("RssAnon")
    );
    let mut ours = Vec::new();
    let mut host = Vec::new();
    for _ in 0..500 {
        let start = Instant::now();
        assert_eq!(guest.exec(&[("argv", words(&["/bin/true"]))]).exit, Some(0));
        ours.push(start.elapsed().as_micros() as u64);
        let start = Instant::now();
        assert!(Command::new("/bin/true").status().unwrap().success());
        host.push(start.elapsed().as_micros() as u64);
    }
    println!(
        "exec true p50 {} us; posix_spawn + wait on the host {} us",
        p50(ours),
        p50(host)
    );
    println!(
        "VmRSS after 500 commands {} KiB, RssAnon {} KiB",
        guest.status_kib("VmRSS"),
        guest.status_kib("RssAnon")
    );
}
