"""Multi-node deployment: job files for Slurm, Ray and Kubernetes."""
