"""Rollout jobs shared by `eval`, `synthesize` and `evolve`: rows, servers, resume log."""
