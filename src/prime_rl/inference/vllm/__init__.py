"""vLLM backend: launching its server, additional routes, and verified weight loading."""
