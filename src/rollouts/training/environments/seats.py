"""Episodes of several seats: a game whose players are the trained policy, or frozen models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rollouts.training.agent_integration import Rollout
from rollouts.training.environments.plain import PlainEnvironment, add_reasoning, build_request, read_message, read_turn
from rollouts.training.environments.protocol import (
    RewardError,
    Row,
    add_usage,
    check_reward,
    describe_failure,
    open_conversation,
)
from rollouts.training.seeds import derive_seed
from rollouts.training.types import Message, Status


class Game(Protocol):
    """The state of one game."""

    @property
    def seat(self) -> str | None:
        """The seat whose turn it is; None: the game is over."""

    def messages(self) -> list[Message]:
        """The prompt of the next move: all that its seat sees."""

    def move(self, text: str) -> None:
        """Make the move that the seat's answer contains; an invalid one is part of the game, never an exception."""

    def rewards(self) -> dict[str, float]:
        """Reward of every seat; also of a game that was stopped before its end."""


@dataclass(frozen=True)
class Frozen:
    """A model that plays a seat without being trained: `model` at `base_url`; None: at the policy's server."""

    model: str
    base_url: str | None = None


class SeatEnvironment(PlainEnvironment):
    """Games in which the policy plays every seat, except those that `frozen(row)` gives to other models.

    `start(row)` begins a game. The calls of each seat become samples of their own, with its reward; the advantage
    compares a seat with the same seat of other games. The reward of a rollout is that of its first trained seat, and
    every seat has a metric `reward_<seat>`. A game of more than `max_turns` moves is truncated, and one with a later
    prompt beyond the context of its model; so is one in which the policy's answer was cut off at `max_tokens`, which
    goes on to its end.
    """

    builds_prompts = True

    def __init__(
        self,
        dataset: Iterable[Mapping[str, Any]],
        start: Callable[[Row], Game],
        *,
        frozen: Callable[[Row], Mapping[str, Frozen]] = lambda row: {},
        eval_dataset: Iterable[Mapping[str, Any]] | None = None,
        max_turns: int = 100,
        id: str = "",
    ) -> None:
        super().__init__(dataset, lambda: 0.0, eval_dataset=eval_dataset, max_turns=max_turns, id=id)
        self.start, self.frozen = start, frozen
        self._others: dict[str, Any] = {}

    async def _run_turns(
        self, rollout: Rollout, row: Row, state: dict[str, Any], client: Any, model: str, args: dict[str, Any]
    ) -> None:
        game, frozen, conversations = self.start(row), dict(self.frozen(row)), dict[str, Any]()
        request, completion = build_request(args), list[Message]()
        num_moves, is_cut, reason = 0, False, "max_turns"
        while (seat := game.seat) is not None and num_moves < self.max_turns:
            other = frozen.get(seat)
            if seat not in conversations:
                conversations[seat] = client if other is None else self._open_frozen(client, other)
            messages = game.messages()
            name = model if other is None else other.model
            if args.get("seed") is not None:
                request["seed"] = derive_seed(args["seed"], num_moves)
            try:
                answer = await conversations[seat].chat.completions.create(model=name, messages=messages, **request)
            except Exception as error:
                if not num_moves or describe_failure(error)[0] != "OverlongPrompt":
                    raise
                reason = "prompt_too_long"
                break
            choice = answer.choices[0]
            message = add_reasoning(read_message(choice.message), choice.message)
            completion += [*messages[-1:], message] if num_moves else [message]
            num_moves += 1
            if other is None:
                rollout.num_turns += 1
                is_cut |= choice.finish_reason == "length"
                rollout.completion_tokens = add_usage(rollout.completion_tokens, answer)
                if (turn := read_turn(answer)) is not None:
                    turn.seat = seat
                    rollout.turns = [*rollout.turns, turn]
            game.move(str(message["content"]))
        rollout.completion = completion
        if game.seat is not None:
            rollout.status, rollout.stop_reason = Status.TRUNCATED, reason
        elif is_cut:
            rollout.status, rollout.stop_reason = Status.TRUNCATED, "length"
        state["rewards"], state["frozen"] = game.rewards(), frozen

    def _open_frozen(self, client: Any, player: Frozen) -> Any:
        """A conversation of its own, so that its tokens do not count as sampled; a client per server, made once."""
        if player.base_url is None:
            return open_conversation(client)
        if player.base_url not in self._others:
            self._others[player.base_url] = client.with_options(base_url=player.base_url)
        return open_conversation(self._others[player.base_url])

    async def _score(self, rollout: Rollout, row: Row, state: dict[str, Any]) -> None:
        rewards = {seat: check_reward(f"the reward of {seat}", value) for seat, value in state["rewards"].items()}
        if missing := sorted({str(turn.seat) for turn in rollout.turns} - rewards.keys()):
            raise RewardError(f"rewards() has none of {', '.join(missing)}: return one for each seat")
        rollout.seat_rewards, rollout.metrics = rewards, {f"reward_{seat}": value for seat, value in rewards.items()}
        rollout.reward = next((rewards[seat] for seat in rewards if seat not in state["frozen"]), 0.0)
