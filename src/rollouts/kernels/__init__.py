"""Optional kernels: for CPUs in C, compiled on first use if there is a compiler; for GPUs in Triton."""
