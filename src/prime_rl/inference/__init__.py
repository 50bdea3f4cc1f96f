"""The inference server and the engines behind it."""
