"""The part of set-up that uses the project's own code: seccomp blob and base image. Skips what is done."""

import hashlib
import sys
import time
from pathlib import Path

import dsec.security.profile
import dsec.security.ranges
import dsec.security.seccomp
from dsec.api.errors import DsecError
from dsec.images import bootstrap_debian
from dsec.paths import Paths
from dsec.security import compile_profile, find_profile
from dsec.security.profile import ProfileError


def main() -> int:
    """Prepare the home of this checkout and return the exit code."""
    paths = Paths.discover()
    try:
        prepare_seccomp(paths)
        bootstrap_debian(paths.images_dir, progress=Reporter())
    except (ProfileError, DsecError) as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


def prepare_seccomp(paths: Paths) -> None:
    """Compile the default profile unless the blob was made from the same profile by the same code."""
    source = find_profile()
    key = hashlib.sha256(source.read_bytes())
    for module in (dsec.security.profile, dsec.security.ranges, dsec.security.seccomp):
        key.update(Path(str(module.__file__)).read_bytes())
    stamp = paths.seccomp_blob.with_name(".stamp-seccomp")
    if paths.seccomp_blob.exists() and stamp.exists() and stamp.read_text() == key.hexdigest():
        return
    report = compile_profile(source, paths.seccomp_blob)
    print(f"setup: seccomp profile: {report.rules} rules, {len(report.unknown)} unknown to this libseccomp", flush=True)
    stamp.write_text(key.hexdigest())


class Reporter:
    """Prints each step of the image once, with the time it began; silent when there was nothing to do."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._steps = 0

    def __call__(self, message: str, share: float) -> None:
        """Take one progress report."""
        if share < 1.0 or self._steps:
            print(f"setup: base image: {share:4.0%} {time.monotonic() - self._started_s:5.1f} s  {message}", flush=True)
        self._steps += 1


if __name__ == "__main__":
    sys.exit(main())
