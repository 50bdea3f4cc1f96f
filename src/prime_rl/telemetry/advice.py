"""Advice that warnings in the log and findings of the page have in common."""

MORE_SERVERS = "add inference servers (orchestrator.client.base_url; with vLLM also inference.parallel.dp)"
