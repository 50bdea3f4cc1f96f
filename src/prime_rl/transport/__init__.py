"""Wires between the processes: batches out, weights back, and how to wait for either."""
