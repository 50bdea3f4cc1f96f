"""HTTP client of the inference servers: connections, retries, multi-turn token bookkeeping, batching, scoring."""
