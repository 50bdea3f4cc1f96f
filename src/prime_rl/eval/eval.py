"""`eval`: serve the model if need be, run the environments, write results, show a table.

model --> server (ours for a local model) --> environments --> evals/<env>/{results.jsonl,summary.json} --> table
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.eval.config import EvalConfig, EvalEnvConfig
from prime_rl.utils.pydantic_config import run_command

if TYPE_CHECKING:
    from prime_rl.eval.envs import Target
    from prime_rl.utils.process import Supervisor
    from rollouts.training.agent_integration import Rollout
    from rollouts.training.environments import Environment

OPENAI_URL = "https://api.openai.com/v1"
HOST = "127.0.0.1"
SERVER_NAME = "eval_inference"
PROGRESS_S = 5.0
WATCH_S = 0.5
Summaries = dict[tuple[str, int], dict[str, float]]


@dataclass(frozen=True)
class Plan:
    """What is evaluated: the model's name for requests, who serves it, and the steps to load one after the other."""

    model: str
    serve: bool
    base_urls: tuple[str, ...]
    steps: tuple[int, ...] = ()


def evaluate(config: EvalConfig) -> int:
    """Evaluate as configured; returns the exit code."""
    import anyio
    from loguru import logger

    from prime_rl.utils.http import ensure_open_files
    from prime_rl.utils.logger import setup_logger
    from prime_rl.utils.process import ChildFailed
    from prime_rl.utils.vf import check_environments, open_environments

    plan = make_plan(config)
    check_environments(config.env)
    setup_logger("eval", config.log, config.output_dir / "logs")
    if advice := ensure_open_files(config.max_concurrent):
        logger.warning(advice)
    try:
        # The environments load while the server loads its model.
        with start_server(config, plan) as server, open_environments(config.env) as environments:
            base_urls = plan.base_urls if server is None else wait_for_server(config, server)
            summaries = anyio.run(run_evaluation, config, plan, base_urls, environments, server)
    except ChildFailed as failure:
        if failure.wrong_input is None:
            raise
        raise ValueError(failure.wrong_input) from failure
    show_table(summaries)
    sys.stdout.write(f"Every rollout: {config.output_dir / 'evals'}\n")
    return 0


def make_plan(config: EvalConfig) -> Plan:
    """Decide who serves the model; `ValueError` for a model or a step that is not there."""
    from prime_rl.utils.tokenizer import resolve_model_dir

    name, steps, urls = config.model.name, find_steps(config), tuple(config.client.base_url)
    if config.weights_dir is not None:
        from rollouts.training.steps import step_path

        if urls:
            return Plan(name, False, urls, steps)
        first = str(step_path(config.weights_dir, steps[0]))
        return Plan(str(resolve_model_dir(first)), True, (), steps)
    if urls:
        return Plan(name, False, urls)
    if is_openai_model(name):
        import os

        if not os.environ.get(config.client.api_key_var):
            raise ValueError(
                f"model.name {name!r} is no local model and {config.client.api_key_var} is not set for the OpenAI API\n"
                "  give a model directory, set that variable, or name a server by --client.base-url"
            )
        return Plan(name, False, (OPENAI_URL,))
    resolve_model_dir(name)
    return Plan(name, True, ())


def is_openai_model(name: str) -> bool:
    """A name without a slash such as gpt-4.1-mini or o4-mini; a misspelt path or shipped model is not one."""
    return re.match(r"(gpt-|chatgpt-|o\d)[\w.:-]*$", name) is not None and not Path(name).exists()


def find_steps(config: EvalConfig) -> tuple[int, ...]:
    """The steps to evaluate; `ValueError` naming those of `weights_dir` when one is missing."""
    from rollouts.training.steps import complete_steps

    if config.weights_dir is None:
        return ()
    present = complete_steps(config.weights_dir)
    missing = [step for step in config.steps if step not in present]
    if missing or not present:
        what = f"has no complete step_{missing[0]}" if missing else "holds no complete step_N"
        raise ValueError(
            f"weights_dir {config.weights_dir} {what}; there are: {', '.join(map(str, present)) or 'none'}"
        )
    return tuple(config.steps or present)


@dataclass(frozen=True)
class Server:
    """The inference server that we started."""

    supervisor: Supervisor
    port: int


@contextmanager
def start_server(config: EvalConfig, plan: Plan) -> Iterator[Server | None]:
    """Our own server while it loads, or None where another one serves the model."""
    from prime_rl.utils.process import Supervisor, find_free_port

    if not plan.serve:
        yield None
        return
    port = find_free_port()
    # Ctrl-C raises KeyboardInterrupt as anywhere, and leaving the context stops the server.
    with Supervisor(config.output_dir / "logs", handle_signals=False) as supervisor:
        supervisor.start(SERVER_NAME, build_server_argv(config, plan, port))
        yield Server(supervisor, port)


def wait_for_server(config: EvalConfig, server: Server) -> tuple[str, ...]:
    """The addresses of our own server, once it answers."""
    from prime_rl.utils.process import is_healthy

    what = "the inference server to load the model"
    server.supervisor.wait_for(lambda: is_healthy(HOST, server.port), timeout_s=config.server_timeout, what=what)
    return (f"http://{HOST}:{server.port}/v1",)


def build_server_argv(config: EvalConfig, plan: Plan, port: int) -> list[str]:
    """The command line of our own inference server."""
    options: dict[str, Any] = {"model.name": plan.model, "server.port": port, "log.file": "false"}
    debug = config.model.debug
    options |= {"model.debug.random_init": str(debug.random_init).lower(), "model.debug.seed": debug.seed}
    if debug.num_layers is not None:
        options["model.debug.num_layers"] = debug.num_layers
    if config.model.max_model_len is not None:
        options["model.max_model_len"] = config.model.max_model_len
    if config.weights_dir is not None:
        options["weight_dirs"] = json.dumps([str(config.weights_dir.resolve())])
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    return [sys.executable, "-m", "prime_rl.inference.server", *words]


async def run_evaluation(
    config: EvalConfig,
    plan: Plan,
    base_urls: Sequence[str],
    environments: Mapping[str, Environment],
    server: Server | None,
) -> Summaries:
    """Every step in every environment; a server that falls meanwhile ends it at once."""
    import anyio

    failure: list[Exception] = []
    summaries: Summaries = {}

    async def watch_server() -> None:
        while server is not None:
            try:
                server.supervisor.check()
            except Exception as error:
                failure.append(error)
                tasks.cancel_scope.cancel()
            await anyio.sleep(WATCH_S)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch_server)
        async for target in targets(config, plan, base_urls):
            for env in config.env:
                name = env.name or env.id
                summaries[name, target.version] = await evaluate_environment(config, env, environments[name], target)
        tasks.cancel_scope.cancel()
    if failure:
        raise failure[0]
    return summaries


async def targets(config: EvalConfig, plan: Plan, base_urls: Sequence[str]) -> AsyncIterator[Target]:
    """The model as it was given, or each step of `weights_dir` once the servers hold it."""
    from loguru import logger

    from prime_rl.eval.envs import Target
    from rollouts.training.steps import parse_step, step_path
    from rollouts.training.weight_sync import PrimeEngine, sync_weights_to_engines

    async with connect(config, base_urls) as clients:
        if config.weights_dir is None:
            yield Target(clients, plan.model, parse_step(Path(plan.model).name) or 0)
            return
        engines = [PrimeEngine(url, headers=clients[0].headers) for url in base_urls]
        for step in plan.steps:
            path = step_path(config.weights_dir, step).resolve()
            logger.info(f"Loading {path}")
            await sync_weights_to_engines(engines, str(path))
            yield Target(clients, plan.model, step)


@asynccontextmanager
async def connect(config: EvalConfig, base_urls: Sequence[str]) -> AsyncIterator[list[Any]]:
    """One client per server; `ValueError` for an address where nobody answers."""
    from prime_rl.utils.client import build_clients
    from prime_rl.utils.config import ClientConfig

    fields = {name: getattr(config.client, name) for name in ClientConfig.model_fields}
    clients = build_clients(ClientConfig(**{**fields, "base_url": list(base_urls)}))
    try:
        for client in clients:
            try:
                await client.request("GET", "/models")
            except Exception as error:
                if hasattr(error, "status_code"):  # somebody is there; the first request tells whether they serve us
                    continue
                raise ValueError(
                    f"client.base_url {client.base_url} does not answer: start that server, or leave client.base_url "
                    "out and eval serves a local model itself"
                ) from error
        yield clients
    finally:
        for client in clients:
            await client.close()


async def evaluate_environment(
    config: EvalConfig, env: EvalEnvConfig, environment: Environment, target: Target
) -> dict[str, float]:
    """Run one environment, write its results, and return its summary."""
    from loguru import logger

    from prime_rl.eval.envs import result_rows, run_environment, summarize
    from prime_rl.utils.monitor import build_monitor

    name, started, last_said, finished = env.name or env.id, time.monotonic(), time.monotonic(), 0

    def say_progress(group: list[Rollout]) -> None:
        nonlocal last_said, finished
        finished += len(group)
        if time.monotonic() - last_said > PROGRESS_S:
            last_said = time.monotonic()
            logger.info(f"{name}: {finished} rollouts, {finished / (last_said - started):.1f} per second")

    groups = await run_environment(environment, env, config, target, say_progress)
    summary = summarize(groups, config.num_rollouts(env), config.pass_threshold)
    summary["time"] = time.monotonic() - started
    write_results(results_dir(config, name, target.version), result_rows(groups), summary, config, target)
    monitor = build_monitor(config.output_dir, "eval", config.wandb)
    monitor.log({f"eval/{name}/{key}": value for key, value in summary.items()}, target.version)
    monitor.finish()
    errors = [rollout for group in groups for rollout in group if rollout.failed]
    if errors:
        last = f"{errors[-1].error_type}: {errors[-1].error}"
        logger.warning(f"{name}: {len(errors)} rollouts failed and are in no average; the last: {last}")
        if not summary["rollouts"]:
            raise RuntimeError(f"all rollouts of {name} failed; the last: {last}")
    return summary


def results_dir(config: EvalConfig, name: str, version: int) -> Path:
    """`evals/<env>`, in a series `evals/step_N/<env>`."""
    root = config.output_dir / "evals"
    folder = name.replace("/", "_")
    return root / folder if config.weights_dir is None else root / f"step_{version}" / folder


def write_results(
    folder: Path, rows: Sequence[Mapping[str, Any]], summary: Mapping[str, float], config: EvalConfig, target: Target
) -> None:
    """Write results.jsonl and summary.json whole, in place of those of an earlier evaluation."""
    from rollouts.training.metrics import append_jsonl

    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / ".results.jsonl"
    temporary.unlink(missing_ok=True)
    append_jsonl(temporary, rows)
    temporary.replace(folder / "results.jsonl")
    model = str(config.weights_dir / f"step_{target.version}") if config.weights_dir else config.model.name
    numbers = {key: value if math.isfinite(value) else None for key, value in summary.items()}
    content = {"model": model, "step": target.version, "seed": config.seed, **numbers}
    temporary = folder / ".summary.json"
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    temporary.replace(folder / "summary.json")


def show_table(summaries: Summaries) -> None:
    """One row per environment (and step), for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Evaluation", title_justify="left")
    table.add_column("environment", no_wrap=True)
    rows = {(f"{name} (step {step})" if step else name): format_row(s) for (name, step), s in summaries.items()}
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    for column in columns:
        table.add_column(column, justify="right")
    for name, row in rows.items():
        table.add_row(name, *(row.get(column, "") for column in columns))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def format_row(summary: Mapping[str, float]) -> dict[str, str]:
    """Column -> text of one row of the table."""
    row = {"examples": f"{summary['examples']:.0f}"}
    for key, value in summary.items():
        if key.startswith(("avg@", "pass@")) and not key.endswith("/stderr"):
            error = summary.get(f"{key}/stderr", math.nan)
            row[key] = f"{value:.4f}" + (f" ± {error:.4f}" if math.isfinite(error) else "")
        elif key.startswith("metrics/") and (key, value) != ("metrics/num_turns", 1.0):
            row[key.removeprefix("metrics/")] = f"{value:.4f}"
    if "completion_len/mean" in summary:
        row["tokens"] = f"{summary['completion_len/mean']:.1f}"
    row["truncated"] = f"{summary['is_truncated/mean']:.1%}"
    row["errors"] = f"{summary['error/mean']:.1%}"
    row["time"] = f"{summary['time']:.1f} s"
    return row


def main() -> None:
    """Console script `eval`."""
    run_command(
        "eval",
        EvalConfig,
        evaluate,
        summary="Evaluate a model, a server or a series of checkpoints in verifiers environments.",
    )


if __name__ == "__main__":
    main()
