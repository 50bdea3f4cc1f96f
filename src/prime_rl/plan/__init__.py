"""`plan`: what fits on a cluster, how long a step takes, who waits for whom, and what to change."""
