"""Reinforcement learning of a nanochat model in a verifiers environment, in one process or several.

    python -m scripts.prime_rl_train                                    # documented defaults, the deepest sft model
    python -m scripts.prime_rl_train --config configs/prime_rl/small_scale.toml --run=debug
    torchrun --standalone --nproc_per_node=8 -m scripts.prime_rl_train -- --run=my_experiment

        questions --> groups of rollouts, through the environment and its rubric     (every rank its share)
                        |  rewards, all ranks together --> advantages
                        v
        one step of Muon and AdamW, gradients summed over ranks --> the next version of the policy

With `--async_level=L` generation runs ahead of training, by L versions at most.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.prime_rl_config import PROG, PrimeRLTrainConfig, Resolved, normalize_argv, resolve

from prime_rl.configuration.command import run_command

if TYPE_CHECKING:
    from scripts.prime_rl_watch import RunLogger

    from nanochat.checkpoint_manager import CheckpointLocation
    from nanochat.learner import StepResult
    from rollouts.training.backends.ranks import Ranks
    from rollouts.training.types import Sample


DECODED_ROWS = 32
"""Sequences decoded at once for each of `device_batch_size`: decoding takes about that much less memory of each."""
FREE = frozenset(
    "run resume device device_batch_size save_every eval_every log_every viz_every eval_examples eval_samples "
    "wandb_project wandb_entity".split()
)
"""Arguments that may change when a run is resumed: samples and steps do not depend on them, but for rounding."""
DERIVED = frozenset("source model_tag step model learning_rate env trainer wandb distributed".split())
"""Arguments that are compared by what they resolve to."""


class Trainer:
    """Components of one rank: policy, trainer, engine, environment, questions and logger."""

    def __init__(self, resolved: Resolved, ranks: Ranks, env: Any, threads: ExitStack) -> None:
        from nanochat.chat_client import ChatClient
        from nanochat.checkpoint_manager import load_model
        from nanochat.common import resolve_dtype
        from nanochat.engine import Engine
        from nanochat.learner import NanochatTrainer
        from nanochat.optim import build_optimizer
        from rollouts.training.rl_losses import PolicyLoss

        self.resolved, self.ranks, self.env = resolved, ranks, env
        config = self.config = resolved.config
        self.place = find_source(config)
        self.tag = config.model_tag or _tag_of(self.place.model_path)
        self.model, self.tokenizer, self.meta = load_model(
            config.source, ranks.device, "train", self.tag, self.place.step
        )
        self.objective = resolved.objective
        self.rows = env.rows("train")
        self.eval_rows = env.rows("eval")[: config.eval_examples] if resolved.has_evaluation else []
        if not self.rows:
            raise ValueError(f"environment {config.env_id!r} has no training questions: raise num_train_examples")
        first = zip(self.eval_rows, self.rows, strict=False)
        if self.eval_rows and all(held_out["prompt"] == row["prompt"] for held_out, row in first):
            resolved.notes.append("the environment has no held-out questions: evaluations are on training questions")
        self.num_groups = min(config.examples_per_step, len(self.rows))
        self.num_steps = config.max_steps or math.ceil(len(self.rows) / self.num_groups) * config.num_epochs
        dtype = resolve_dtype(config.dtype, ranks.device)
        self.optimizer = build_optimizer(
            self.model,
            unembedding_lr=config.unembedding_lr,
            embedding_lr=config.embedding_lr,
            matrix_lr=config.matrix_lr,
            weight_decay=config.weight_decay,
        )
        self.learner = NanochatTrainer(
            self.model,
            self.optimizer,
            PolicyLoss(self.objective),
            ranks=ranks,
            micro_batch_size=config.device_batch_size,
            top_k=config.top_k,
            dtype=dtype,
            schedule=partial(learning_rate_factor, config=config, num_steps=self.num_steps),
            max_grad_norm=config.max_grad_norm,
            reference=deepcopy(self.model).requires_grad_(False) if self.objective.kl_coef else None,
        )
        # At level 0 one thread does everything in turn; else the engine has a thread and weights of its own.
        self.learning = threads.enter_context(ThreadPoolExecutor(1, "learner"))
        self.is_async = config.async_level > 0
        generating = threads.enter_context(ThreadPoolExecutor(1, "engine")) if self.is_async else self.learning
        served = deepcopy(self.model).requires_grad_(False) if self.is_async else self.model
        max_rows = DECODED_ROWS * config.device_batch_size
        build_engine = partial(Engine, tokenizer=self.tokenizer, dtype=dtype, max_rows=max_rows)
        self.client = ChatClient(build_engine(served), generating, config.max_new_tokens)
        self.eval_client = ChatClient(build_engine(self.model), self.learning)
        self.evaluation: dict[str, float] = {}
        """Of the current weights; empty if they were not evaluated."""
        self.resumed_run: str | None = None
        """Name of the run whose checkpoint was resumed."""

    @property
    def sampling(self) -> dict[str, Any]:
        """How answers are sampled, in training and in evaluations."""
        config = self.config
        extra = {"top_k": config.top_k} if config.top_k else {}
        return {"temperature": config.temperature, "max_tokens": config.max_new_tokens, "extra_body": extra}

    async def generate_group(self, group_index: int, row: dict[str, Any]) -> list[Sample]:
        """The rollouts of one question, generated by its rank; placeholders on the others."""
        from nanochat.chat_client import group_samples, run_rollouts
        from rollouts.training.types import Sample

        if group_index % self.ranks.size != self.ranks.rank:
            return [Sample("")]
        seed = (self.config.seed, group_index)
        rollouts = await run_rollouts(self.env, self.client, row, self.config.num_samples, seed, self.sampling)
        return group_samples(self.client, rollouts, group_index)

    def learn(self, samples: list[Sample]) -> tuple[list[Sample], StepResult, float]:
        """Exchange samples with the other ranks, credit them, take the step; also the seconds of the exchange."""
        from rollouts.training.advantages import assign_advantages

        self.evaluation = {}
        began = time.perf_counter()
        everything = exchange(samples, self.ranks)
        exchange_s = time.perf_counter() - began
        assign_advantages(everything, baseline=self.objective.advantage.baseline, std=self.objective.advantage.std)
        return everything, self.learner.learn(everything), exchange_s

    async def publish(self, version: int) -> None:
        """Send the weights of a version to the engine, between two of its batches."""
        if self.is_async:
            weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self.client.executor, self.client.engine.model.load_state_dict, weights)
        self.client.version = version

    async def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the current weights on held-out questions at the training temperature; ranks agree."""
        from nanochat.evaluation import evaluate, summarize_scores

        if not self.eval_rows:
            return {}
        scored = await evaluate(
            self.env,
            self.eval_client,
            self.eval_rows,
            self.ranks,
            num_samples=self.config.eval_samples,
            seed=self.config.seed + 1,
            sampling=self.sampling,
        )
        self.evaluation = summarize_scores(scored)
        return {f"eval/{name}": value for name, value in self.evaluation.items()}

    def save(self, step: int, progress: dict[str, Any]) -> None:
        """Publish `prime_rl_checkpoints/TAG/step_N`, from rank 0, with the state for an exact resume."""
        from nanochat.checkpoint_manager import DIGEST_KEY, prime_rl_dir, write_model, write_progress
        from rollouts.training.backends.checkpoint import collect_optimizer
        from rollouts.training.steps import publish_step

        moments = collect_optimizer(self.model, self.optimizer, self.ranks)
        metadata = {
            "step": step,
            "model_config": self.model.config.to_meta(),
            DIGEST_KEY: self.tokenizer.digest,
            "evaluation": self.evaluation,
            **self.describe(),
        }
        state = {"manager": progress, "stepper": self.learner.stepper.state(), "num_steps": self.num_steps}

        def write(directory: Path) -> None:
            write_model(directory, self.model, metadata)
            write_progress(directory, moments, state)

        self.ranks.run_on_rank0(lambda: publish_step(prime_rl_dir(self.tag), step, write))

    def describe(self) -> dict[str, Any]:
        """The part of the metadata that a resumed run must have in common with the saved one, without secrets."""
        from prime_rl.runtime.redaction import redact_fields

        described: dict[str, Any] = redact_fields(
            {
                "source": {"source": self.config.source, "model_tag": self.tag, "step": self.place.step},
                "config": self.config.model_dump(mode="json"),
                "env_args": self.resolved.env_args,
            }
        )
        return described

    def lock(self, stack: ExitStack) -> None:
        """Lock the directories that this run writes, and remove unfinished checkpoints of a crashed one.

        `ValueError` if another run writes to one of them.
        """
        from nanochat.checkpoint_manager import prime_rl_dir
        from nanochat.common import get_base_dir
        from prime_rl.runtime.run_dir import lock_file
        from rollouts.training.steps import remove_unfinished

        def enter() -> None:
            runs = get_base_dir() / "prime_rl_runs" / self.config.run
            for directory, option in ((prime_rl_dir(self.tag), "--model_tag"), (runs, "--run")):
                message = f"another run writes to {directory}: choose another {option} or NANOCHAT_BASE_DIR"
                stack.enter_context(lock_file(directory / ".lock-run", message))
            remove_unfinished(prime_rl_dir(self.tag))

        self.ranks.run_on_rank0(enter)

    def archive_earlier_run(self) -> None:
        """Move checkpoints of an earlier run of this model to `attempts/N`: `--resume` would continue with them."""
        from nanochat.checkpoint_manager import prime_rl_dir
        from prime_rl.runtime.run_dir import RunDir, find_steps
        from rollouts.training.steps import step_path

        def move() -> None:
            root = prime_rl_dir(self.tag)
            folder = RunDir(root).archive(step_path(root, step) for step in find_steps(root))
            if folder is not None:
                print(f"note: checkpoints of an earlier run moved to {folder}", flush=True)

        self.ranks.run_on_rank0(move)

    def resume(self, manager: Any) -> int:
        """Take over the last checkpoint of this model; returns its step."""
        from nanochat.checkpoint_manager import check_tokenizer, find_checkpoint, load_state, read_progress
        from prime_rl.runtime.redaction import redact_fields
        from rollouts.training.backends.checkpoint import read_tensors, restore_optimizer
        from rollouts.training.json_files import read_json_file

        place = find_checkpoint("prime_rl", self.tag)
        moments, state = read_progress(place.directory)
        saved = read_json_file(place.meta_path)
        check_tokenizer(saved, self.tokenizer, place.model_path)
        if differences := find_differences(redact_fields(saved), self.describe()):
            raise ValueError(
                f"{place.directory} belongs to another run ({', '.join(differences)}): resume with the same arguments, "
                "or begin a new run without --resume, which moves these checkpoints to attempts/"
            )
        if state["num_steps"] != self.num_steps:
            raise ValueError(
                f"{place.directory} belongs to a run of {state['num_steps']} steps, this one has {self.num_steps}: "
                "resume with the same arguments"
            )
        load_state(self.model, read_tensors(place.model_path), str(place.model_path))
        restore_optimizer(self.model, self.optimizer, moments, str(place.directory))
        self.learner.stepper.load_state(state["stepper"])
        manager.load_state_dict(state["manager"])
        self.resumed_run = saved.get("config", {}).get("run", self.config.run)
        return place.step


async def train(trainer: Trainer, watch: RunLogger) -> None:
    """Training loop: wait for groups, take a step, and release rollout slots."""
    from scripts.prime_rl_watch import summarize_step

    from rollouts.training.datasets.data_buffer import DataBuffer
    from rollouts.training.rollout_gen.async_rollout_manager import AsyncRolloutManager
    from rollouts.training.types import RolloutConfig

    config, loop = trainer.config, asyncio.get_running_loop()
    manager = AsyncRolloutManager(
        DataBuffer(trainer.rows, seed=config.seed),
        RolloutConfig(trainer.num_groups, config.num_samples),
        generate_group=trainer.generate_group,
        slots=(config.async_level + 1) * trainer.num_groups,
        max_batches=trainer.num_steps,
        seed=config.seed,
    )
    start = 0
    if config.resume:
        start = trainer.resume(manager)
    else:
        trainer.archive_earlier_run()
    watch.begin(start)
    await trainer.publish(start)
    if start == 0:
        watch.log(0, await trainer.evaluate(0))
    async with manager:
        for step in range(start + 1, trainer.num_steps + 1):
            began = time.perf_counter()
            batch = await manager.generate_batch()  # waits for: rollouts
            rolled = time.perf_counter()
            samples, learned, exchange_s = await loop.run_in_executor(trainer.learning, trainer.learn, batch.samples)
            done = time.perf_counter()
            metrics = summarize_step(step, samples, learned)
            metrics |= {"time/rollout_s": rolled - began, "time/train_s": done - rolled, "time/step_s": done - began}
            metrics |= {"distributed/world_size": trainer.ranks.size, "distributed/exchange_s": exchange_s}
            metrics["perf/tokens_per_s"] = learned.num_tokens / max(done - began, 1e-9)
            metrics["perf/samples_per_s"] = len(samples) / max(done - began, 1e-9)
            is_last = step == trainer.num_steps
            if is_last or step % config.eval_every == 0:
                metrics |= await trainer.evaluate(step)
                metrics["time/eval_s"] = time.perf_counter() - done
            if watch.is_drawn(step):
                await loop.run_in_executor(trainer.learning, watch.measure_surface, step, samples)
            await trainer.publish(step)
            manager.release(step)  # unblocks: rollouts by the new version
            if is_last or step % config.save_every == 0:
                # Each rank has the samples of its own groups only, and all ranks resume with the state of rank 0.
                trainer.save(step, manager.state_dict(keep_ready=trainer.ranks.size == 1))
            watch.log(step, metrics, samples, learned)


def exchange(samples: Sequence[Sample], ranks: Ranks) -> list[Sample]:
    """The samples of all ranks in group order, without placeholders."""
    import msgspec

    from rollouts.training.types import Sample, Status

    mine = [sample for sample in samples if sample.tokens or sample.status == Status.FAILED]
    parts = ranks.gather_bytes(msgspec.msgpack.encode(mine))
    everything = [sample for part in parts for sample in msgspec.msgpack.decode(part, type=list[Sample])]
    everything.sort(key=lambda sample: (sample.group_index, sample.index))
    usable = [sample for sample in everything if sample.status != Status.FAILED]
    if not usable:
        reason = next((sample.error for sample in everything if sample.error), "the environment made none")
        raise RuntimeError(f"no rollout of this step can be used: {reason}")
    return everything


def learning_rate_factor(step: int, *, config: PrimeRLTrainConfig, num_steps: int) -> float:
    """Linear warm-up to `init_lr_frac`, then linear decay to 0 after the last step."""
    warm = min(1.0, step / config.warmup_steps) if config.warmup_steps else 1.0
    return config.init_lr_frac * warm * max(0.0, 1 - (step - 1) / num_steps)


def find_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What distinguishes a saved run from this one, in words; both as in `Trainer.describe`.

    What another version did not save is not compared.
    """
    words = []
    for part, new in now.items():
        old = saved.get(part, new)
        names = new.keys() | old.keys()
        if part == "config":
            names = (new.keys() & old.keys()) - FREE - DERIVED
        prefix = "env.args." if part == "env_args" else ""
        changed = (name for name in sorted(names) if old.get(name) != new.get(name))
        words += [f"{prefix}{name} was {old.get(name)!r}, now {new.get(name)!r}" for name in changed]
    return words


def find_source(config: PrimeRLTrainConfig) -> CheckpointLocation:
    """The checkpoint to begin with; `ValueError` for one in the directory in which the run saves its own."""
    from nanochat.checkpoint_manager import SOURCES, find_checkpoint
    from nanochat.common import get_base_dir

    place = find_checkpoint(config.source, config.model_tag, config.step)
    if config.source == "prime_rl":
        target = get_base_dir() / SOURCES["rl"] / _tag_of(place.model_path)
        raise ValueError(
            f"{place.directory} is where a run of this model saves its own checkpoints: copy it to {target} and use "
            "--source=rl instead of prime_rl"
        )
    return place


def _tag_of(path: Path) -> str:
    """The directory of a tag, above flat files or above `step_N`."""
    return path.parent.parent.name if path.parent.name.startswith("step_") else path.parent.name


def run(config: PrimeRLTrainConfig) -> int:
    """Load all components, then train; returns the exit code."""
    import logging

    resolved = resolve(config, config.provenance, int(os.environ.get("WORLD_SIZE", "1")), os.environ)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    from scripts.prime_rl_watch import RunLogger

    from nanochat.common import open_ranks
    from rollouts.training.environments import load_environment

    config = resolved.config
    find_source(config)  # before anything that takes time
    with open_ranks(config.device, config.distributed.backend) as ranks, ExitStack() as stack:
        env = load_environment(config.env_id, resolved.env_args)
        trainer = Trainer(resolved, ranks, env, stack)
        trainer.lock(stack)
        if ranks.rank == 0:
            for note in resolved.notes:
                print(f"note: {note}")
            print(
                f"{config.source} model {trainer.tag} step {trainer.place.step} on {ranks.device}, {ranks.size} ranks"
            )
            print(f"rollouts through {getattr(env, 'env', env)!r}")
            print(resolved.describe(), flush=True)
        with closing(RunLogger(trainer)) as watch:
            asyncio.run(train(trainer, watch))
    return 0


if __name__ == "__main__":
    sys.argv[1:] = normalize_argv(sys.argv[1:])
    run_command(PROG, PrimeRLTrainConfig, run, summary=str(__doc__).splitlines()[0])
