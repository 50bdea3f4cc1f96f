"""All kinds of `verifiers` environments through the adapter, in this process and in a worker."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest
import verifiers as vf
import virtual_time
from adapter_envs import ROWS
from datasets import Dataset
from fake_transport import END, Wire, check, encode, turn

from prime_rl.configuration.sections import SamplingConfig
from prime_rl.utils.vf import build_sampling_args
from rollouts.training.agent_integration import Rollout, rollout_to_samples
from rollouts.training.environments import load_environment
from rollouts.training.environments.verifiers_adapter import CLEANUP_S, VerifiersEnvironment
from rollouts.training.types import Status

KINDS = ("single", "multi", "tool", "stateful", "group", "completion")


def run(kind: str, script: list[dict[str, Any]], retries: int = 0, **args: Any) -> tuple[Wire, Rollout]:
    wire = Wire(script=script)
    env = load_environment("adapter_envs:load_environment", {"kind": kind})
    sampling = build_sampling_args(SamplingConfig(**args), 1)
    [rollout] = anyio.run(env.run_group, env.rows()[0], wire, "m", [sampling], retries)
    return wire, rollout


def test_single_turn() -> None:
    wire, rollout = run("single", [turn([*encode("yes"), END])])
    [sample] = rollout_to_samples(rollout)
    check(wire, [sample])
    assert (rollout.reward, rollout.metrics["said_yes"], rollout.num_turns) == (1.0, 1.0, 1)


def test_an_example_id_that_is_no_number_is_replaced() -> None:
    env = load_environment("adapter_envs:load_environment", {"kind": "single"})
    env.env.dataset = env.env.dataset.remove_columns("example_id").add_column("example_id", ["gsm8k-17"])
    [row] = env.rows()
    assert (row["example_id"], row["src_id"]) == (0, "gsm8k-17")
    wire, args = Wire(script=[turn([*encode("yes"), END])]), [build_sampling_args(SamplingConfig(), 1)]
    [rollout] = anyio.run(env.run_group, {**row, "example_id": "gsm8k-17"}, wire, "m", args, 0)
    assert (rollout.example_id, rollout.reward) == (0, 1.0)


def test_info_may_be_the_text_of_a_list() -> None:
    env = load_environment("adapter_envs:load_environment", {"kind": "single"})
    env.env.dataset = env.env.dataset.add_column("info", [json.dumps(["x"])])
    wire, args = Wire(script=[turn([*encode("yes"), END])]), [build_sampling_args(SamplingConfig(), 1)]
    [rollout] = anyio.run(env.run_group, env.rows()[0], wire, "m", args, 0)
    assert (rollout.reward, rollout.tools, rollout.failed) == (1.0, None, False)


class Rewording(vf.SingleTurnEnv):
    """Writes the prompt itself; `verifiers` cuts the completion at its length."""

    async def setup_state(self, state: vf.State) -> vf.State:
        state["prompt"] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "really?"}]
        return state


@pytest.mark.parametrize("fails", [False, True])
def test_a_rollout_has_the_prompt_that_was_sent(fails: bool) -> None:
    env = VerifiersEnvironment("e", Rewording(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric()))
    [row], wire = env.rows(), FlakyWire(script=[turn([*encode("yes"), END])])
    wire.failing = [0] if fails else []
    [rollout] = anyio.run(env.run_group, row, wire, "m", [build_sampling_args(SamplingConfig(), 1)], 0)
    sent = [body["messages"] for path, body in wire.seen if path.startswith("/chat")]
    assert rollout.failed == fails and [rollout.prompt] == ([row["prompt"]] if fails else sent)
    assert rollout.prompt[-1]["content"] == ("is it?" if fails else "really?")


def test_multi_turn_is_one_sample_of_tokens() -> None:
    wire, rollout = run("multi", [turn([49, 50]), turn([*encode("no"), END]), turn([*encode("yes"), END])])
    [sample] = rollout_to_samples(rollout)
    check(wire, [sample])
    assert rollout.num_turns == 3 and rollout.stop_reason == "max_turns_reached" and rollout.reward == 1.0
    assert [path for path, _ in wire.seen].count("/chat/completions/tokens") == 2


@pytest.mark.parametrize("kind", ["single", "group", "completion"])
def test_single_turn_ends_as_the_answer_does(kind: str) -> None:
    _, rollout = run(kind, [turn([*encode("yes"), END])])
    assert (rollout.stop_reason, rollout.status) == ("stop", Status.COMPLETED)


def test_stop_condition_is_named_at_the_last_turn() -> None:
    turns = [turn([49, 50, END]), turn([*encode("no"), END]), turn([*encode("yes"), END])]
    assert run("solved", turns)[1].stop_reason == "solved"
    assert run("solved", [turn([*encode("yes"), END])])[1].stop_reason == "solved"
    assert run("solved", [*turns[:2], turn([*encode("no"), END])])[1].stop_reason == "max_turns_reached"


@pytest.mark.parametrize("kind", ["tool", "stateful"])
def test_tools_are_called_and_answered(kind: str) -> None:
    call = {"name": "add", "arguments": json.dumps({"x": 2, "y": 3})}
    wire, rollout = run(kind, [turn([*encode("call"), END], call=call), turn([*encode("yes"), END])])
    [sample] = rollout_to_samples(rollout)
    check(wire, [sample])
    tool = next(message for message in rollout.completion if message["role"] == "tool")
    assert tool["content"] == ("5" if kind == "tool" else "105"), "the hidden argument is 100"
    assert rollout.metrics["total_tool_calls"] == rollout.metrics["add_calls"] == 1.0 and rollout.reward == 1.0
    [tools] = {json.dumps(body["tools"]) for path, body in wire.seen if path.startswith("/chat")}
    assert ("hidden" in tools) is False


def test_a_group_of_environments_routes_and_scores_by_task() -> None:
    wire, rollout = run("group", [turn([*encode("yes"), END])])
    assert rollout.task == "a" and rollout.reward == 1.0
    check(wire, rollout_to_samples(rollout))


@pytest.mark.parametrize("kind", ["single", "group", "part"])
def test_stop_strings_of_an_environment_are_used(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    own = {"n": 1, "stop": ["\n"], "temperature": 0.2, "extra_body": {"top_k": 5}}
    common = {"dataset": Dataset.from_list(ROWS), "rubric": vf.Rubric()}
    env = vf.SingleTurnEnv(**common, sampling_args=None if kind == "group" else own)
    if kind != "single":
        env = vf.EnvGroup(envs=[vf.SingleTurnEnv(**common), env], sampling_args=own if kind == "group" else None)
    adapter = VerifiersEnvironment("e", env)
    [warning] = [text for text in caplog.messages if "sampling_args" in text]
    assert warning.startswith("e: its sampling_args have no effect (extra_body, temperature): set them in")
    for given, expected in (([], ["\n"]), (["x"], ["x"])):
        wire, args = Wire(script=[turn([*encode("yes"), END])]), build_sampling_args(SamplingConfig(stop=given))
        anyio.run(adapter.run_group, adapter.rows()[-1], wire, "m", [args])
        [body] = [body for path, body in wire.seen if path.startswith("/chat")]
        assert (body["stop"], body["temperature"]) == (expected, 1.0)


def test_usual_sampling_args_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    common = {"dataset": Dataset.from_list(ROWS), "rubric": vf.Rubric()}
    VerifiersEnvironment("e", vf.SingleTurnEnv(**common, sampling_args={"stop": ["\n"], "max_tokens": None}))
    assert not [text for text in caplog.messages if "sampling_args" in text]


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        (KeyError("judge"), r"compare: KeyError: 'judge' \(.*test_verifiers_adapter\.py:\d+\)"),
        ([1.0, float("nan")], r"compare returned nan: return a finite number, such as 0\.0 or 1\.0"),
        (["1", "1"], r"compare returned '1': return a finite number, such as 0\.0 or 1\.0"),
        ([1.0], r"compare returned \[1\.0\]: return a list of 2 numbers, one per rollout"),
        (0.5, r"compare returned 0\.5: return a list of 2 numbers, one per rollout"),
        ([0.5, 2], None),
    ],
)
@pytest.mark.parametrize("takes_any", [False, True])
def test_errors_of_group_rewards_are_reported(returned: Any, error: str | None, takes_any: bool) -> None:
    """As those of other reward functions; the rewards themselves reach the rollouts."""

    def compare(completions: list[Any]) -> Any:
        if isinstance(returned, Exception):
            raise returned
        return returned

    def compare_any(completions: list[Any], **rest: Any) -> Any:
        assert len(rest["states"]) == 2
        return compare(completions)

    compare_any.__name__ = "compare"
    rubric = vf.Rubric(funcs=[compare_any if takes_any else compare])
    env = VerifiersEnvironment("e", vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS), rubric=rubric))
    assert env.scores_groups
    wire, args = Wire(script=[turn([*encode("yes"), END])] * 2), [build_sampling_args(SamplingConfig(), 1)] * 2
    rollouts = anyio.run(env.run_group, env.rows()[0], wire, "m", args, 0)
    if error is None:
        assert [(r.reward, r.metrics["compare"], r.error) for r in rollouts] == [(0.5, 0.5, None), (2.0, 2.0, None)]
        return
    for rollout in rollouts:
        assert (rollout.reward, rollout.error_type) == (0.0, "RewardError") and re.fullmatch(error, rollout.error or "")


def test_rubrics_that_score_groups_themselves_are_found() -> None:
    class Ranking(vf.Rubric):
        async def score_group(self, states: list[vf.State], *args: Any, **kwargs: Any) -> None: ...

    def scores_groups(rubric: vf.Rubric) -> bool:
        env = vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS), rubric=rubric)
        return VerifiersEnvironment("e", vf.EnvGroup(envs=[env])).scores_groups

    assert scores_groups(Ranking()) and scores_groups(vf.RubricGroup(rubrics=[vf.Rubric(), Ranking()]))
    assert not scores_groups(vf.RubricGroup(rubrics=[vf.Rubric(), vf.Rubric()]))


@pytest.mark.parametrize(
    ("chain", "kind", "error"),
    [
        ([vf.InfraError("no judge")], "InfraError", "InfraError: no judge"),
        ([vf.SandboxError(), OSError("gone")], "InfraError", "OSError: gone"),
        ([vf.ToolCallError(), vf.SandboxError("gone"), OSError("away")], "InfraError", "SandboxError: gone"),
        ([vf.ToolCallError(), KeyError("name")], "KeyError", "'name'"),
    ],
)
def test_errors_of_sandboxes_are_of_infrastructure(chain: list[Exception], kind: str, error: str) -> None:
    """Each error is caused by the next; a prompt whose rollouts failed by one of infrastructure is drawn again."""

    class Raising(vf.SingleTurnEnv):
        async def setup_state(self, state: vf.State) -> vf.State:
            raise chain[0]

    for effect, cause in pairwise(chain):
        effect.__cause__ = cause
    env = VerifiersEnvironment("e", Raising(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric()))
    [rollout] = anyio.run(env.run_group, env.rows()[0], Wire(), "m", [build_sampling_args(SamplingConfig(), 1)], 0)
    assert (rollout.failed, rollout.error_type, rollout.error) == (True, kind, error)


class Waiting(vf.MultiTurnEnv):
    """Never answers the model; its cleanup takes `cleanup_s` seconds."""

    cleanup_s, num_freed = 1.0, 0

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        await anyio.sleep_forever()

    @vf.cleanup
    async def free(self, state: vf.State) -> None:
        await anyio.sleep(self.cleanup_s)
        self.num_freed += 1


@pytest.mark.parametrize("has_timeout", [True, False])
@pytest.mark.parametrize("cleanup_s", [1.0, 1000.0])
def test_cancelled_rollouts_are_cleaned_up(has_timeout: bool, cleanup_s: float) -> None:
    env = Waiting(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric())
    env.cleanup_s = cleanup_s
    adapter = VerifiersEnvironment("e", env, timeout_s=10.0 if has_timeout else None)
    wire, args = Wire(script=[turn([*encode("yes"), END])]), [build_sampling_args(SamplingConfig(), 1)]

    async def measure() -> float:
        with anyio.move_on_after(math.inf if has_timeout else 10.0):
            [rollout] = await adapter.run_group(adapter.rows()[0], wire, "m", args)
            assert rollout.error_type == "RolloutTimeout"
        return anyio.current_time()

    assert virtual_time.run(measure) == 10.0 + min(cleanup_s, CLEANUP_S)
    assert env.num_freed == (1 if cleanup_s < CLEANUP_S else 0)


def test_groups_with_cleanup_have_cleanup() -> None:
    common = {"dataset": Dataset.from_list(ROWS), "rubric": vf.Rubric()}
    parts = [vf.SingleTurnEnv(**common), Waiting(**common)]
    assert [VerifiersEnvironment("e", part).has_cleanup for part in parts] == [False, True]
    assert VerifiersEnvironment("e", vf.EnvGroup(envs=parts)).has_cleanup


def test_plain_completions() -> None:
    wire, rollout = run("completion", [turn([*encode("yes"), END])])
    check(wire, rollout_to_samples(rollout))
    assert rollout.reward == 1.0 and rollout.completion == "yes"


def test_empty_completion_is_a_valid_rollout() -> None:
    """Newer verifiers calls it an error; it is what the policy did, and what it must unlearn."""
    wire, rollout = run("single", [turn([END])], retries=3)
    assert not rollout.failed and rollout.reward == 0.0 and len(wire.sampled) == 1
    check(wire, rollout_to_samples(rollout))


def test_truncated_completion_has_length_status() -> None:
    wire, rollout = run("multi", [turn([*encode("no" * 9), END])], max_tokens=5)
    assert rollout.status == Status.TRUNCATED and rollout.stop_reason == "length"
    check(wire, rollout_to_samples(rollout))


class FlakyWire(Wire):
    """Refuses one request each time after these numbers of responses."""

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path != "/tokenize" and len(self.sampled) in self.failing:
            self.failing.remove(len(self.sampled))
            raise ConnectionError("the server is gone")
        return super().answer(path, body)

    failing: list[int]


@pytest.mark.parametrize(("failing", "fails"), [([1], False), ([1, 3], True)])
def test_tokens_of_failed_attempts_are_counted(failing: list[int], fails: bool) -> None:
    wire = FlakyWire(script=[turn([49, 50]), turn([*encode("no"), END]), turn([*encode("no"), END])])
    wire.failing = failing
    env = load_environment("adapter_envs:load_environment", {"kind": "multi"})
    [rollout] = anyio.run(env.run_group, env.rows()[0], wire, "m", [build_sampling_args(SamplingConfig(), 1)], 1)
    assert rollout.failed == fails and wire.failing == []
    assert rollout.num_sampled == sum(len(ids) for _, ids, _ in wire.sampled)
    assert sum(len(turn.completion_ids) for turn in rollout.turns) < rollout.num_sampled


def execute(code: str, *folders: Path) -> list[str]:
    path = os.pathsep.join([*map(str, folders), str(Path(__file__).parents[2] / "fakes"), os.environ["PYTHONPATH"]])
    environ = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_environment_code_runs_before_verifiers_import(tmp_path: Path) -> None:
    (tmp_path / "verifiers.py").write_text("import os\nhome = os.environ['HF_HOME']\n")
    (tmp_path / "early.py").write_text(
        "import os\nos.environ['HF_HOME'] = '/data/hf'\nimport verifiers\n"
        "def load_environment():\n    raise ValueError(verifiers.home)\n"
    )
    code = "from rollouts.training.environments import load_environment\n"
    code += "try:\n    load_environment('early')\nexcept ValueError as error:\n    print(error)\n"
    assert "ValueError: /data/hf (" in execute(code, tmp_path)[0]
