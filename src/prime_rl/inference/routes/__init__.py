"""HTTP routes of the inference server."""
