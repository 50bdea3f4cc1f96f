"""Types of answers."""


class Completion:
    """Of a prompt."""
