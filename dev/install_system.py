"""Install Debian packages that tests need: `python dev/install_system.py chromium slurm-wlm`.

Does nothing if their commands exist. Without root or apt-get it prints the command to run and exits with 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

COMMANDS = {
    "chromium": ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"),
    "iproute2": ("ip",),
    "kubernetes-client": ("kubectl",),
    "munge": ("munged",),
    "slurm-wlm": ("slurmctld",),
}
"""Any of these shows that the package, or another one of the same program, is installed."""
APT = ("apt-get", "-o", "Acquire::http::Timeout=20", "-o", "Acquire::Retries=1")
TIMEOUT_S = 600


def main() -> int:
    """Exit code: 0 if everything is installed."""
    missing = [name for name in sys.argv[1:] if not any(map(shutil.which, COMMANDS[name]))]
    if not missing:
        return 0
    install = ("install", "-y", "--no-install-recommends", *missing)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print(f"not installed: {', '.join(missing)}; cure: sudo apt-get {' '.join(install)}", file=sys.stderr)
        return 1
    print(f"==> installing {', '.join(missing)} with apt-get", flush=True)
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (("update",), install):
        try:
            done = subprocess.run(
                [*APT, *words], env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            print(f"error: apt-get {words[0]} took longer than {TIMEOUT_S} s", file=sys.stderr)
            return 1
        if done.returncode:
            print(done.stdout[-1000:] + done.stderr[-2000:], file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
