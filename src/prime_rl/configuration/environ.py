"""Selection of the environment variables that set configuration keys."""

from __future__ import annotations

from collections.abc import Mapping

PREFIX = "PRIME_"
CREDENTIALS = ("PRIME_INTELLECT_", "PRIME_API_KEY")


def config_env_vars(environ: Mapping[str, str]) -> list[str]:
    """Sorted names of the non-empty PRIME_ variables that are not credentials."""
    return sorted(
        name
        for name, value in environ.items()
        if value and name.startswith(PREFIX) and not name.startswith(CREDENTIALS)
    )
