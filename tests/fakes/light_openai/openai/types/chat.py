"""Types of answers."""


class ChatCompletion:
    """Of messages."""
