"""Agents as programs: an HTTP gateway that records what the engine sampled for them, and a runner of their processes.

agent.py  --OpenAI or Anthropic API-->  gateway (in the environment worker)  --tokens-->  inference server
"""
