//! Start, end and restart of sandboxes through the socket, on the real kernel. Needs root, gcc, busybox-static, erofs-utils.

mod common;

use common::*;

#[test]
fn a_container_starts_answers_and_ends() {
    let _turn = turn();
    let mut launcher = Launcher::start();
    let hello = launcher.ask("hello", vec![("proto", 1.into())]);
    assert_eq!(hello.uint("slots").expect("uint"), Some(4095));
    let sandbox = launcher.run("a");
    assert_eq!(
        sandbox.hello,
        "ready hi argc=6 probe channel=3 userns=4 runs=5 pids=6 oom=7"
    );
    assert_eq!(sandbox.sh("echo hello; id -u"), "hello\n0");
    let rows = launcher.kill(&["a"]);
    assert_eq!(rows["a"].get("status"), Some(&Value::from(-9)));
    assert!(launcher.kill(&["a"])["a"]
        .sub("error")
        .expect("map")
        .is_some());
    launcher.finish();
}
