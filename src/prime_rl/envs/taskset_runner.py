"""Runs a taskset of verifiers 0.4 for `tasksets.py`, in the interpreter `env.python`; imports nothing of this package.

    python taskset_runner.py SETTINGS    {"taskset", "harness", "num_examples", "num_eval_examples"} as JSON

Reads one JSON object per line of standard input: a rollout to run, {"run": number, "task": index, "base_url", "key",
"model"}, or {"cancel": number}. The end of the input ends the process. Writes, a line each, {"rows", "eval_rows"} or
{"error"} at the start, and the result of each rollout as it ends.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import sys
from typing import IO, Any

ENDLESS = 1000
"""Tasks of an endless taskset if `num_examples` is unset."""
KEY_VARIABLE = "GATEWAY_API_KEY"
"""verifiers does not pass on variables of this form to the programs of a harness."""
NO_PROMPT = "(the taskset opens the conversation)"


def build_environment(taskset: dict[str, Any], harness: dict[str, Any] | None) -> Any:
    """The environment with the policy in its one seat; raises `ValueError`."""
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type

    config_cls = env_config_type(taskset["id"])
    seats = [name for name, field in config_cls.model_fields.items() if isinstance(field.default, vf.AgentConfig)]
    if len(seats) != 1:
        raise ValueError(f"taskset {taskset['id']!r} has the agents {', '.join(seats)}: only one can be trained")
    settings = dict(harness or {})
    agent = {name: settings.pop(name) for name in list(settings) if name in vf.AgentConfig.model_fields}
    agent.setdefault("runtime", {"type": "subprocess"})
    own = default_harness_id(taskset["id"])
    agent["harness"] = {"id": "null" if own == "bash" else own, **settings}
    environment = vf.load_environment(config_cls.model_validate({"taskset": taskset, seats[0]: agent}))
    spec = agent_config_fields(environment.config)[seats[0]]
    if vf.load_harness(spec.harness).EXECUTES_CODE and spec.runtime.type == "subprocess":
        raise ValueError(
            f"harness {spec.harness.id!r} lets the model run commands on this machine: set a container, such as "
            'env.harness.runtime = {type = "docker"}'
        )
    return environment


def read_tasks(taskset: Any, num_examples: int | None, num_eval_examples: int) -> tuple[list[Any], list[Any]]:
    """Tasks to train and to evaluate on: the first ones, and those after them.

    Of a finite taskset that has too few: the last ones, at most those beyond `num_examples`, or half of all.
    """
    if not taskset.bounded:
        num_examples = num_examples or ENDLESS
    tasks = list(itertools.islice(taskset, None if num_examples is None else num_examples + num_eval_examples))
    beyond = 0 if num_examples is None else len(tasks) - num_examples
    held_out = min(num_eval_examples, max(beyond, len(tasks) // 2))
    return tasks[: len(tasks) - held_out], tasks[len(tasks) - held_out :]


def describe_task(task: Any, number: int) -> dict[str, Any]:
    """The row of a task."""
    data = task.data.model_dump(mode="json", exclude_defaults=True)
    data.pop("prompt", None)  # without the roles of its messages, which are defaults
    prompt = task.data.model_dump(mode="json", include={"prompt"}, exclude_none=True).get("prompt")
    row = {"prompt": prompt or NO_PROMPT, "task_number": number}
    if system := data.pop("system_prompt", None):
        messages = row["prompt"] if isinstance(row["prompt"], list) else [{"role": "user", "content": row["prompt"]}]
        row["prompt"] = [{"role": "system", "content": system}, *messages]
    if "answer" in data:
        row["answer"] = str(data.pop("answer"))
    data.pop("idx", None)
    return {**row, "info": data} if data else row


class Runner:
    """Runs the rollouts of one taskset."""

    def __init__(self, environment: Any, tasks: list[Any], out: IO[str]) -> None:
        self._environment, self._tasks, self._out = environment, tasks, out
        self._running: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Run rollouts until the end of standard input."""
        reader = asyncio.StreamReader(limit=1 << 20)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        async with self._environment.serving():
            while line := await reader.readline():
                request = json.loads(line)
                if "run" in request:
                    number = request["run"]
                    self._running[number] = asyncio.create_task(self._run(number, request))
                elif request["cancel"] in self._running:
                    self._running[request["cancel"]].cancel()
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _run(self, number: int, request: dict[str, Any]) -> None:
        try:
            result = await self._play(request)
        except (Exception, asyncio.CancelledError) as error:  # canceled by the parent, which drops it, or by a library
            result = {"error": f"{type(error).__name__}: {error}"}
        finally:
            del self._running[number]
        print(json.dumps({"run": number, **result}), file=self._out, flush=True)

    async def _play(self, request: dict[str, Any]) -> dict[str, Any]:
        import verifiers.v1 as vf

        os.environ[KEY_VARIABLE] = request["key"]
        client = vf.EvalClientConfig(base_url=request["base_url"], api_key_var=KEY_VARIABLE)
        context = vf.ModelContext(client=client, model=request["model"], sampling=vf.SamplingConfig())
        (slot,) = self._environment.slots(self._tasks[request["task"]])
        episode = await self._environment.run_slot(slot, context)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        return {
            "reward": sum(trace.reward for trace in episode.traces),
            "metrics": _read_metrics(episode.traces),
            "error": None if episode.ok or not errors else f"{errors[-1].type}: {errors[-1].message}",
            "stop": next((trace.stop_condition for trace in episode.traces if trace.stop_condition), None),
        }


def _read_metrics(traces: list[Any]) -> dict[str, float]:
    """Metrics of verifiers, and its rewards before weighting."""
    metrics: dict[str, float] = {}
    for trace in traces:
        metrics |= {name: float(value) for name, value in trace.metrics.items() if value is not None}
        metrics |= {name: float(reward.score) for name, reward in trace.rewards.items() if reward is not None}
    return metrics


def main() -> int:
    """Run the process; returns its exit code."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a taskset prints is no result
    logging.basicConfig(level=logging.ERROR)
    settings = json.loads(sys.argv[1])
    sys.path.append(os.getcwd())
    try:
        environment = build_environment(settings["taskset"], settings["harness"])
        rows, eval_rows = read_tasks(environment.taskset, settings["num_examples"], settings["num_eval_examples"])
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=out, flush=True)
        return 1
    tasks = [*rows, *eval_rows]
    described = [describe_task(task, number) for number, task in enumerate(tasks)]
    print(json.dumps({"rows": described[: len(rows)], "eval_rows": described[len(rows) :]}), file=out, flush=True)
    asyncio.run(Runner(environment, tasks, out).serve())
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # the parent was stopped; a normal exit would write again
        os._exit(0)
