"""Metrics: trackers, Prometheus, health checks, busy intervals, console progress."""
