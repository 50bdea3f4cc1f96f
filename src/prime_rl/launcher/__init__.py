"""Parts of the `rl` command: GPUs, output directory, summary."""
