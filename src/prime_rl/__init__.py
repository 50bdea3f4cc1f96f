"""The processes: configs, wires, servers and launchers of asynchronous RL for language models."""
