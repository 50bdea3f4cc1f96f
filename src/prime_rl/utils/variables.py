"""Which environment variables are meant for the configuration."""

from __future__ import annotations

from collections.abc import Mapping

PREFIX = "PRIME_"
CREDENTIALS = ("PRIME_INTELLECT_", "PRIME_API_KEY")


def configuring(environ: Mapping[str, str]) -> list[str]:
    """Names of the PRIME_ variables that hold something and are nobody's credentials, sorted."""
    return sorted(
        name
        for name, value in environ.items()
        if value and name.startswith(PREFIX) and not name.startswith(CREDENTIALS)
    )
