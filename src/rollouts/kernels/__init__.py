"""Optional CPU kernels, compiled on first use if there is a C compiler."""
