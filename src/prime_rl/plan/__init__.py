"""`plan`: memory, time per step and bottlenecks of a configuration on a cluster."""
