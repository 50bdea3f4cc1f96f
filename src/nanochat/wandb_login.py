"""API keys of Weights & Biases that `wandb login` keeps. Imports nothing but the standard library."""

from __future__ import annotations

import configparser
import netrc
import os
from urllib.parse import urlsplit

CLOUD = ("api.wandb.ai", "api.forge.coreweave.com")
"""Names of the server of Weights & Biases, of earlier and later versions of wandb."""


def is_logged_in() -> bool:
    """Whether the user's netrc file has a key for the server, as written by `wandb login`."""
    try:  # with the path, since without one Python refuses a file that others may read, and wandb does not
        machines = netrc.netrc(os.path.expanduser(os.environ.get("NETRC") or "~/.netrc"))
        return any(machines.authenticators(name) is not None for name in _find_machines())
    except (OSError, ValueError, netrc.NetrcParseError):
        return False


def _find_machines() -> tuple[str, ...]:
    """The server, as host and port: that of WANDB_BASE_URL, else of wandb's settings files, else the cloud."""
    settings = configparser.ConfigParser(interpolation=None)
    folder = os.path.expanduser(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb")
    if not (url := os.environ.get("WANDB_BASE_URL")):
        try:
            settings.read([os.path.join(folder, "settings"), os.path.join("wandb", "settings")])
        except configparser.Error:  # wandb reads such a file as an empty one
            settings.clear()
        url = settings.get("default", "base_url", fallback=f"https://{CLOUD[0]}")
    machine = urlsplit(url).netloc
    return CLOUD if machine in CLOUD else (machine,)
