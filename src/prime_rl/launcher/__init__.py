"""Parts of the `rl` command: GPUs, output directory, summary, layout on a cluster."""
