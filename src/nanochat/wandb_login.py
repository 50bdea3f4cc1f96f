"""API keys of Weights & Biases that `wandb login` keeps. Imports nothing but the standard library."""

from __future__ import annotations

import netrc
import os
from urllib.parse import urlsplit


def is_logged_in() -> bool:
    """Whether the user's netrc file has a key for the server, as written by `wandb login`."""
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:  # with the path, since without one Python refuses a file that others may read, and wandb does not
        file = os.environ.get("NETRC") or os.path.expanduser("~/.netrc")
        return netrc.netrc(file).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
