"""vLLM's own server behind the door of ours: how it is started, our routes in it, and verified weights."""
