"""An agent with the `openai-agents` package."""

import json
import sys

from agents import Agent, Runner, function_tool

task = json.load(sys.stdin)


@function_tool
def worth(name: str) -> str:
    """The worth of a name."""
    return task["info"]["worth"].get(name, "unknown")


@function_tool
def mass(name: str) -> str:
    """The mass of a name."""
    return task["info"]["mass"].get(name, "unknown")


agent = Agent("helper", model="policy", tools=[worth, mass])
print(Runner.run_sync(agent, task["prompt"][0]["content"]).final_output)
