"""Rollout jobs shared by `eval` and `synthesize`: rows, servers, resume log."""
