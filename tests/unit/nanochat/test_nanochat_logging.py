"""Metrics and figures of nanochat runs against hand-made samples, the adapter, `.env` and the four configurations."""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nanochat import prime_rl_figures as figures
from nanochat.env_file import read_env_file, read_variable
from nanochat.gpt import GPT, GPTConfig
from nanochat.loss_surface import compute_loss_surface
from nanochat.prime_intellect_integration import PrimeIntellectRLAdapter
from nanochat.prime_rl_wandb import (
    DEFAULT_TAGS,
    OfflineWandbRun,
    RLMetricsTracker,
    draw_figure,
    log_prime_rl_metrics_to_wandb,
    setup_prime_rl_wandb,
)
from nanochat.tokenizer import NanochatTokenizer

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from scripts.prime_rl_config import normalize_argv, parse_arguments  # noqa: E402
from scripts.prime_rl_watch import RunLogger, describe_ranks  # noqa: E402

from rollouts.training.backends.ranks import Ranks  # noqa: E402
from rollouts.training.types import Sample  # noqa: E402

FIGURES = ("reward_landscape_3d", "advantage_distribution", "gradient_flow", "loss_surface", "pass_at_k")


@pytest.fixture
def tracker() -> RLMetricsTracker:
    """Two steps of four samples, an evaluation, gradients and a surface."""
    tracker = RLMetricsTracker()
    for step in (1, 2):
        tracker.log_rollout(step, [0, 1, 1, 0], [3, 5, 7, 9], [-0.5, 0.5, 0.5, -0.5])
        tracker.log_gradients(step, {"transformer.wte.weight": 0.1, "transformer.h.0.mlp.c_fc.weight": 3.0 * step,
                                     "transformer.h.0.attn.c_q.weight": 4.0 * step, "lm_head.weight": 1.0})  # fmt: skip
    tracker.log_evaluation(2, 0.25, {1: 0.25, 2: 0.5}, categorical_accuracy=0.2)
    tracker.log_loss_surface(2, {"alpha": [-1, 0, 1], "beta": [-1, 0, 1], "loss": [[2, 1, 2]] * 3, "here": 1.0})
    return tracker


# numbers ------------------------------------------------------------------------------------------------------------


def test_statistics_are_over_samples_of_the_step() -> None:
    tracker = RLMetricsTracker()
    tracker.log_rollout(3, torch.tensor([1.0, 0.0]), np.array([4, 6]), [0.5, -0.5])
    tracker.log_rollout(3, [1.0], [8], [0.0])  # a second part of the same step
    tracker.log_policy_update(3, policy_loss=0.5, entropy=1.5)
    tracker.log_token_metrics(torch.tensor([[-1.0, -3.0]]), [0.5, 1.5])
    tracker.log_distributed_metrics(2, 0.25, [{"mean_reward": 1.0}, {"mean_reward": 0.5}])
    summary = tracker.get_wandb_summary()
    assert summary == pytest.approx(
        {
            "rollout/mean_reward": 2 / 3,
            "rollout/max_reward": 1.0,
            "rollout/min_reward": 0.0,
            "rollout/std_reward": math.sqrt(2 / 9),
            "rollout/mean_length": 6.0,
            "rollout/max_length": 8.0,
            "rollout/min_length": 4.0,
            "rollout/std_length": math.sqrt(8 / 3),
            "advantages/mean": 0.0,
            "advantages/std": math.sqrt(1 / 6),
            "advantages/zero": 1 / 3,
            "policy/loss": 0.5,
            "policy/entropy": 1.5,
            "tokens/mean_logprob": -2.0,
            "tokens/mean_entropy": 1.0,
            "distributed/world_size": 2.0,
            "distributed/mean_sync_time": 0.25,
            "distributed/rank_0/mean_reward": 1.0,
            "distributed/rank_1/mean_reward": 0.5,
        }
    )
    assert "policy/value_loss" not in summary  # there is no value model, so there is no zero either
    tracker.log_policy_update(4, 0.1, value_loss=0.3)
    assert tracker.get_wandb_summary() == {"policy/loss": 0.1, "policy/value_loss": 0.3}
    assert tracker.get_wandb_summary(3) == summary


def test_statistics_leave_out_values_that_are_not_finite(tracker: RLMetricsTracker) -> None:
    nan, inf = math.nan, math.inf
    tracker.log_rollout(3, [1.0, nan], [inf, 4], [nan, -0.5])
    tracker.log_token_metrics([-inf, -1.0], [nan, 0.5], step=3)
    summary = tracker.get_wandb_summary(3)
    assert all(map(math.isfinite, summary.values()))
    assert summary["rollout/mean_reward"] == 1.0 and summary["rollout/mean_length"] == 4.0
    assert summary["advantages/mean"] == -0.5 and summary["tokens/mean_logprob"] == -1.0
    tracker.log_rollout(4, [nan], [4])
    assert "rollout/mean_reward" not in tracker.get_wandb_summary(4)
    assert tracker.figure_data()["reward_landscape_3d"]["step"] == [1, 2, 3]


def test_evaluations(tracker: RLMetricsTracker) -> None:
    summary = tracker.get_wandb_summary(2)
    assert summary["eval/pass@2"] == 0.5 and summary["eval/accuracy"] == 0.25
    assert summary["eval/categorical_accuracy"] == 0.2 and summary["gradients/layer 0"] == 10.0
    tracker.log_evaluation(5, 0.1, [0.1, 0.2, 0.3])
    assert tracker.steps[5].pass_at_k == {1: 0.1, 2: 0.2, 3: 0.3}


@pytest.mark.parametrize("values", [np.array([0.25, 0.5]), torch.tensor([0.25, 0.5])])
def test_pass_at_k_may_be_an_array(values: Any) -> None:
    tracker = RLMetricsTracker()
    tracker.log_evaluation(1, 0.25, values)
    assert tracker.steps[1].pass_at_k == {1: 0.25, 2: 0.5}


def test_wrong_input_is_named_and_history_is_bounded() -> None:
    tracker = RLMetricsTracker(max_history=2)
    assert tracker.get_wandb_summary() == {} and tracker.figure_data() == {}
    with pytest.raises(ValueError, match="step 1: 2 rewards, 1 sequence_lengths; give one"):
        tracker.log_rollout(1, [1, 0], [3])
    with pytest.raises(ValueError, match="0 rewards"):
        tracker.log_rollout(1, [], [])
    for step in range(5):
        tracker.log_rollout(step, [1], [1])
    assert list(tracker.steps) == [3, 4]
    with pytest.raises(ValueError, match="nothing was logged for step 1"):
        tracker.get_wandb_summary(1)


def test_ranks_are_logged_separately() -> None:
    samples = [Sample("", reward=float(i), group_index=i, response="x", tokens=[0] * i) for i in range(4)]
    zero, one = describe_ranks(samples, 2)
    assert (zero["mean_reward"], one["mean_reward"], zero["samples"]) == (1.0, 2.0, 2.0)
    assert describe_ranks(samples[:1], 2)[1] == {"samples": 0.0}


# figures ------------------------------------------------------------------------------------------------------------


def test_densities_conserve_samples() -> None:
    data = figures.density_data({1: [0, 0, 1, 1], 2: [], 3: [0.5]})
    assert data is not None and data["step"] == [1, 3] and data["mean"] == [0.5, 0.5] and data["std"] == [0.5, 0.0]
    assert all(math.isclose(sum(row), 1) for row in data["density"])
    assert data["density"][0][0] == data["density"][0][-1] == 0.5
    assert (
        figures.density_data({1: [2.0], 2: [2.0]})["bin"][0] < 2 < figures.density_data({1: [2.0], 2: [2.0]})["bin"][-1]
    )  # type: ignore[index]
    assert figures.density_data({1: [1.0]}) is None


def test_lines_of_a_density_are_mean_and_deviations() -> None:
    pytest.importorskip("plotly")
    figure = draw_figure("advantage_distribution", figures.density_data({1: [0.0, 1.0], 2: [3.0, 3.0]}))
    lines = [trace for trace in figure.data if trace.type == "scatter3d"]
    assert [list(trace.y) for trace in lines] == [[0.5, 3.0], [1.0, 3.0], [0.0, 3.0]]
    assert [trace.name.split()[:2] for trace in lines[1:]] == [["mean", "+"], ["mean", "-"]]


def test_layers_of_gradients() -> None:
    names = {"transformer.h.10.x": 1.0, "transformer.h.2.x": 3.0, "transformer.h.2.y": 4.0, "lm_head.weight": 2.0,
             "transformer.wte.weight": 0.0}  # fmt: skip
    norms = figures.layer_norms(names)
    assert norms == {"embedding": 0.0, "layer 2": 5.0, "layer 10": 1.0, "head": 2.0}
    assert list(norms) == ["embedding", "layer 2", "layer 10", "head"]
    data = figures.gradient_data({1: norms, 2: norms})
    assert data is not None and data["log10_norm"][0] == [None, math.log10(5), 0.0, math.log10(2)]
    assert list(figures.layer_norms({"model.layers.3.mlp.weight": 1.0})) == ["layer 3"]


def test_pass_at_k_has_a_line_per_k_and_gaps() -> None:
    data = figures.pass_at_k_data({0: {1: 0.1, 2: 0.2}, 5: {1: 0.3}, 6: {}})
    assert data == {"step": [0, 5], "k": [1, 2], "value": [[0.1, 0.3], [0.2, None]]}
    assert figures.pass_at_k_data({}) is None


def test_lines_of_a_figure_have_colors_of_their_own() -> None:
    pytest.importorskip("plotly")
    figure = draw_figure("pass_at_k", figures.pass_at_k_data({0: {1: 0.1, 2: 0.2, 4: 0.3}, 5: {1: 0.3}}))
    assert len({trace.line.color for trace in figure.data}) == 3


def test_the_five_figures_are_three_dimensional(tracker: RLMetricsTracker) -> None:
    data = tracker.figure_data()
    assert tuple(data) == FIGURES
    drawn = {name: draw_figure(name, found) for name, found in data.items()}
    kinds = {name: {trace.type for trace in figure.data} for name, figure in drawn.items()}
    assert all("surface" in kinds[name] for name in FIGURES[:4]) and kinds["pass_at_k"] == {"scatter3d"}
    assert len(drawn["pass_at_k"].data) == 2
    for name in FIGURES[:4]:  # rows of a surface go along y
        surface = drawn[name].data[0]
        assert np.shape(surface.z) == (len(surface.y), len(surface.x))
    assert tracker.create_reward_landscape_3d() is not None and RLMetricsTracker().create_pass_at_k_plot() is None


def test_a_loss_surface_of_a_parabola() -> None:
    """The loss |w|^2 is |w|^2 (1 + alpha^2 + beta^2 + ...): a bowl with its value here in the middle."""
    model = torch.nn.Linear(4, 3)
    before = [p.clone() for p in model.parameters()]
    surface = compute_loss_surface(model, lambda: float(model.weight.square().sum()), size=5, radius=1.0, seed=3)
    assert [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)] == [True, True]
    here, loss = surface["here"], surface["loss"]
    assert loss[2][2] == pytest.approx(here) and surface["alpha"] == [-1.0, -0.5, 0.0, 0.5, 1.0]
    # rows of a direction have the norm of the model's rows, so both ends of a line lie |w|^2 above the middle
    for ends in ((loss[0][2], loss[4][2]), (loss[2][0], loss[2][4])):
        assert sum(ends) / 2 - here == pytest.approx(here, rel=1e-4)
    again = compute_loss_surface(model, lambda: float(model.weight.square().sum()), size=5, radius=1.0, seed=3)
    assert again == surface

    def fails() -> float:
        if torch.equal(model.weight, before[0]):
            return 0.0
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        compute_loss_surface(model, fails, size=3)
    assert torch.equal(model.weight, before[0])
    with pytest.raises(ValueError, match="size 4 must be odd"):
        compute_loss_surface(model, lambda: 0.0, size=4)


# where they go ------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No key, no login, no `.env`, no base directory of the user."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_ENTITY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield


def test_without_an_account_everything_is_in_files(
    tracker: RLMetricsTracker, tmp_path: Path, no_account: None, caplog: Any
) -> None:
    run = setup_prime_rl_wandb(run_name="mine", config={"custom_param": 42})
    assert isinstance(run, OfflineWandbRun) and run.directory == tmp_path / "prime_rl_runs" / "mine" and run.config
    assert "no WANDB_API_KEY" in caplog.text
    log_prime_rl_metrics_to_wandb(run, 1, tracker, create_visualizations=False)
    log_prime_rl_metrics_to_wandb(wandb_run=run, step=2, rl_tracker=tracker)
    run.finish()
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2] and lines[1]["eval/pass@2"] == 0.5
    assert json.loads((run.directory / "summary.json").read_text())["rollout/mean_reward"] == 0.5
    assert run.summary.get("rollout/mean_reward") == 0.5
    for name in FIGURES:
        page = (run.directory / "viz" / f"{name}.html").read_text()
        assert 'src="plotly.min.js"' in page and "https://" not in re.sub(r"<script.*?</script>", "", page, flags=re.S)
        assert json.loads((run.directory / "viz" / f"{name}.json").read_text()) == tracker.figure_data()[name]


def test_without_plotly_there_is_the_data(
    tracker: RLMetricsTracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    run = OfflineWandbRun(tmp_path, "x")
    log_prime_rl_metrics_to_wandb(run, 2, tracker)
    assert sorted(path.name for path in (tmp_path / "viz").iterdir()) == sorted(f"{name}.json" for name in FIGURES)
    assert "pip install 'prime-rl[plots]'" in caplog.text


class FakeWandb(ModuleType):
    """The functions of wandb that are used; `init` can be set to fail online."""

    class Error(Exception):
        """A run that did not open."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__("wandb")
        self.asked: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.fails = fails

    @staticmethod
    def Settings(**values: Any) -> dict[str, Any]:
        return values

    def init(self, **values: Any) -> Any:
        self.asked.append(values)
        if self.fails and values["mode"] == "online":
            raise self.Error("no network\nand more")
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, data: dict[str, Any]) -> None:
        self.logged.append(data)


def test_with_a_key_it_goes_to_wandb(
    tracker: RLMetricsTracker, tmp_path: Path, no_account: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (tmp_path / ".env").write_text("WANDB_API_KEY=secret\nWANDB_ENTITY=me\n")
    run = setup_prime_rl_wandb("my-rl-project", "experiment-1", {"custom_param": 42}, ["custom"])
    [requested] = wandb.asked
    assert run is wandb and requested["settings"]["api_key"] == "secret" and requested["entity"] == "me"
    assert (requested["project"], requested["name"], requested["mode"]) == ("my-rl-project", "experiment-1", "online")
    assert requested["config"] == {"custom_param": 42} and requested["tags"] == ["custom"]
    log_prime_rl_metrics_to_wandb(run, 2, tracker)
    numbers, drawn = wandb.logged
    assert numbers["step"] == drawn["step"] == 2 and numbers["advantages/std"] == 0.5
    assert {name for name in drawn if name != "step"} == {f"viz/{name}" for name in FIGURES}
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    setup_prime_rl_wandb()
    assert wandb.asked[-1]["mode"] == "offline" and wandb.asked[-1]["tags"] == list(DEFAULT_TAGS)


def test_a_run_that_does_not_open_is_kept_offline(
    no_account: None, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    wandb = FakeWandb(fails=True)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    setup_prime_rl_wandb(run_name="x")
    assert [requested["mode"] for requested in wandb.asked] == ["online", "offline"]
    assert "no network" in caplog.text and "secret" not in caplog.text
    for name, value in (("WANDB_MODE", "disabled"), ("WANDB_MODE", "online")):
        monkeypatch.setenv(name, value)
        assert isinstance(setup_prime_rl_wandb(run_name="dummy" if value == "online" else "x"), OfflineWandbRun)
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert isinstance(setup_prime_rl_wandb(run_name="x"), OfflineWandbRun)
    assert "not installed" in caplog.text and "pip install 'prime-rl[wandb]'" in caplog.text


def test_a_resumed_run_keeps_its_earlier_summary(tmp_path: Path) -> None:
    for step, data in ((1, {"a": 1.0, "b": 5.0}), (2, {"a": 2.0}), (3, {"a": 3.0})):
        OfflineWandbRun(tmp_path, "x").log({"step": step, **data})
    run = OfflineWandbRun(tmp_path, "x")
    run.continue_from(2)
    run.log({"step": 3, "c": 4.0})
    run.finish()
    OfflineWandbRun(tmp_path, "x").finish()  # logged nothing, writes nothing
    assert json.loads((tmp_path / "summary.json").read_text()) == {"step": 3, "a": 2.0, "b": 5.0, "c": 4.0}


def test_a_local_run_takes_what_a_wandb_run_takes(tmp_path: Path) -> None:
    run = OfflineWandbRun(tmp_path, "x")
    run.log({"a": torch.tensor(0.5), "b": np.float32(0.25), "c": torch.tensor([2]), "d": 1}, step=4)
    run.log({"e": np.arange(2), "f": "text"}, commit=False)
    run.log({"a": 3.0})
    run.log({"a": 4.0})
    run.finish()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [{name: value for name, value in line.items() if name != "timestamp"} for line in lines]
    assert found == [{"step": 4, "a": 0.5, "b": 0.25, "c": 2, "d": 1}, {"step": 5, "a": 3.0}, {"step": 6, "a": 4.0}]
    assert json.loads((tmp_path / "summary.json").read_text()) == {"step": 6, "a": 4.0, "b": 0.25, "c": 2, "d": 1}
    assert [json.loads((tmp_path / f"{name}.json").read_text()) for name in "ef"] == [[0, 1], "text"]


@pytest.mark.parametrize(
    ("given", "is_opened"), [("[]", False), ('["none"]', False), ('["wandb"]', True), ('["none", "wandb"]', True)]
)
def test_report_to_decides_about_wandb(
    given: str, is_opened: bool, tmp_path: Path, no_account: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    (tmp_path / "f.toml").write_text(f"[trainer.args]\nreport_to = {given}\n")
    config = parse_arguments(["@", "f.toml"], 1, {}).config
    trainer = SimpleNamespace(config=config, num_steps=1, ranks=Ranks(), resumed_run=None)
    RunLogger(trainer).begin(0)  # type: ignore[arg-type]
    assert bool(wandb.asked) == is_opened


def test_metrics_of_an_environment_may_have_any_name(no_account: None) -> None:
    config = parse_arguments(["--run=dummy", "--max_steps=9"], 1, {}).config
    optimizer = SimpleNamespace(param_groups=[])
    logger = RunLogger(SimpleNamespace(config=config, num_steps=9, ranks=Ranks(), optimizer=optimizer))  # type: ignore[arg-type]
    logger.runs = [OfflineWandbRun(Path(), "x")]
    names = ("accuracy", "step", "self", "pass_at_k")
    logger.log(1, {f"eval/{name}": float(n) for n, name in enumerate(names)})
    assert [logger.tracker.steps[1].metrics[f"eval/{name}"] for name in names] == [0, 1, 2, 3]


# .env and configurations --------------------------------------------------------------------------------------------


def test_env_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("# A=1\nB = 2 # two\nexport C='x # y'\nD=\nno line\nE=\"a=b\"\n")
    assert read_env_file(tmp_path / ".env") == {"B": "2", "C": "x # y", "E": "a=b"}
    assert read_env_file(tmp_path / "none") == {}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("B", "3")
    assert (read_variable("B"), read_variable("C"), read_variable("D")) == ("3", "x # y", None)


def test_comments_behind_values_of_env_files(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("A= # your name\nB=1\t# tab\nC=#1\nD=a#b # c\nE= 'x' # y\n")
    assert read_env_file(tmp_path / ".env") == {"B": "1", "C": "#1", "D": "a#b", "E": "x"}


def test_env_files_are_found_up_to_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "outer" / "checkout" / "environments" / "mine"
    folder.mkdir(parents=True)
    checkout = folder.parents[1]
    for path, value in ((tmp_path / "outer", "outer"), (checkout, "checkout")):
        (path / ".env").write_text(f"OWN_NAME={value}\n")
    (folder / "pyproject.toml").touch()
    monkeypatch.chdir(folder)
    assert read_variable("OWN_NAME") is None, "no parent is a checkout"
    (checkout / "pyproject.toml").touch()
    assert read_variable("OWN_NAME") == "checkout"
    (checkout / ".env").unlink()
    (tmp_path / "outer" / ".git").mkdir()
    assert read_variable("OWN_NAME") is None, "the search ends at the checkout"
    (folder / ".env").write_text("OWN_NAME=mine\n")
    assert read_variable("OWN_NAME") == "mine"


def test_env_files_of_other_editors(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_bytes(b"\xef\xbb\xbfA=1\r\nB=2\r\n")
    assert read_env_file(path) == {"A": "1", "B": "2"}
    path.write_bytes("A=1\n".encode("utf-16"))
    with pytest.raises(ValueError, match=r"\.env is not a text file in UTF-8: save it as UTF-8"):
        read_env_file(path)


def test_the_template_has_the_five_keys() -> None:
    names = re.findall(r"(?m)^([A-Z_]+)=", (ROOT / ".env.template").read_text())
    assert names == [
        "WANDB_API_KEY", "WANDB_PROJECT", "WANDB_ENTITY", "PRIME_INTELLECT_API_KEY", "PRIME_INTELLECT_ENV_ID",
    ]  # fmt: skip


def test_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.toml").write_text('[wandb]\nproject = "toml"\n')

    def project(argv: list[str], environ: dict[str, str]) -> str:
        return parse_arguments(argv, 1, environ).config.wandb_project

    assert project([], {}) == "nanochat-prime-rl"
    (tmp_path / ".env").write_text("WANDB_PROJECT=file\n")
    assert project([], {}) == "file"
    assert project([], {"WANDB_PROJECT": "variable"}) == "variable"
    assert project(["@", "x.toml"], {"WANDB_PROJECT": "variable"}) == "toml"
    assert project(["@", "x.toml", "--wandb_project=cli"], {"WANDB_PROJECT": "variable"}) == "cli"


SIZES = {  # train, eval, learning rate, rollouts, steps, groups per step of one rank, eval, save, log, decay, warm-up
    "default": (2000, 254, 2e-5, 8, 400, 2, 50, 100, 10, 0.0, 50),
    "small_scale": (500, 100, 2e-5, 4, 100, 1, 25, 50, 5, 0.0, 10),
    "distributed": (10000, 254, 5e-5, 16, 1000, 2, 100, 200, 10, 0.01, 100),
    "full_dataset": (-1, 254, 3e-5, 12, 2000, 3, 200, 400, 20, 0.01, 200),
}


@pytest.mark.parametrize("name", list(SIZES))
def test_the_four_configurations(name: str) -> None:
    path = ROOT / "configs" / "prime_rl" / f"{name}.toml"
    config = parse_arguments(normalize_argv(["--config", str(path)]), 1, {}).config
    found = (
        config.num_train_examples, config.num_eval_examples, config.learning_rate, config.num_samples,
        config.max_steps, config.examples_per_step, config.eval_every, config.save_every, config.log_every,
        config.weight_decay, config.warmup_steps,
    )  # fmt: skip
    assert found == SIZES[name]
    assert (config.source, config.env_id, config.max_grad_norm) == ("sft", "harleycooper/nanochatAquaRat", 1.0)
    if name == "distributed":
        wide = parse_arguments(["--config", str(path)], 8, {}).config
        assert wide.examples_per_step * wide.num_samples == 256


def test_typos_in_documented_configs_are_rejected(tmp_path: Path) -> None:
    paths = sorted((ROOT / "configs" / "prime_rl").glob("*.toml"))
    assert [path.stem for path in paths] == sorted(SIZES)
    for path in paths:
        assert f"configs/prime_rl/{path.name}" in path.read_text() and tomllib.loads(path.read_text())
    (tmp_path / "typo.toml").write_text("[trainer.args]\nmax_step = 3\n")
    with pytest.raises(ValueError, match="max_step"):
        parse_arguments(["@", str(tmp_path / "typo.toml")], 1, {})


# the adapter --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter() -> PrimeIntellectRLAdapter:
    tokenizer = NanochatTokenizer.train(["What is 2+2? Answer: B\n"] * 3, 280)
    model = GPT(
        GPTConfig(sequence_len=64, vocab_size=tokenizer.get_vocab_size(), n_layer=1, n_head=2, n_kv_head=2, n_embd=32)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    args = {"num_train_examples": 5, "num_eval_examples": 2, "difficulty": 0, "short": True}
    return PrimeIntellectRLAdapter(
        model=model, tokenizer=tokenizer, env_id="harleycooper/nanochatAquaRat", env_args=args
    )


def test_the_adapter_answers(adapter: PrimeIntellectRLAdapter) -> None:
    messages = [{"role": "user", "content": "What is 2+2?"}]
    ids = adapter.convert_messages_to_tokens(messages)
    assert ids.shape[0] == 1 and ids.dtype == torch.long
    assert torch.equal(ids, adapter.convert_messages_to_tokens({"messages": messages}))
    texts = adapter.generate_response(messages, num_samples=4, max_tokens=12)
    assert len(texts) == 4 and len(set(texts)) == 4 and all("<|" not in text for text in texts)
    assert len({text[:1] for text in texts}) > 1  # independent from the first token on
    assert adapter.generate_response(messages, num_samples=4, max_tokens=12) != texts
    assert len(set(adapter.generate_response(messages, temperature=0, num_samples=2, max_tokens=5))) == 1


def test_the_adapter_scores(adapter: PrimeIntellectRLAdapter) -> None:
    env = adapter.load_environment()
    assert env is adapter.load_environment() and len(env.get_dataset()) == 5
    row = env.get_dataset()[0]
    assert adapter.compute_reward(row["prompt"], f"Answer: {row['answer']}") == pytest.approx(1.1)
    assert adapter.compute_reward(row["prompt"], "I do not know") == 0.0
    with pytest.raises(ValueError, match="no such prompt"):
        adapter.compute_reward([{"role": "user", "content": "Who?"}], "x")


BROKEN = """
from environments.nanochatAquaRat import nanochatAquaRat

def load_broken(**arguments):
    env = nanochatAquaRat.load_environment(**arguments)
    env.rubric.add_reward_func(broken)
    return env

def broken(completion, **kwargs):
    raise KeyError("no score")
"""


def test_the_adapter_gives_no_reward_without_a_function(
    adapter: PrimeIntellectRLAdapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_rewards.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = PrimeIntellectRLAdapter(adapter.model, adapter.tokenizer, "own_rewards:load_broken", adapter.env_args)
    row = broken.load_environment().get_dataset()[0]
    with pytest.raises(ValueError, match="could not score this: broken: KeyError: 'no score'"):
        broken.compute_reward(row["prompt"], f"Answer: {row['answer']}")


def test_the_adapter_scores_inside_an_event_loop(adapter: PrimeIntellectRLAdapter) -> None:
    async def score() -> float:
        return adapter.compute_reward(adapter.load_environment().get_dataset()[0]["prompt"], "I do not know")

    assert asyncio.run(score()) == 0.0
