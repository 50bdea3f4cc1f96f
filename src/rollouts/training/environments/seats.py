"""Episodes of several seats: a game whose players are the trained policy, or frozen models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rollouts.training.agent_integration import Rollout
from rollouts.training.environments.plain import PlainEnvironment, build_request, read_message, read_turn
from rollouts.training.environments.protocol import Row, add_usage, open_conversation
from rollouts.training.types import Message


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
        """Reward of every seat of a game that is over."""


@dataclass(frozen=True)
class Frozen:
    """A model that plays a seat without being trained: `model` at `base_url`; None: at the policy's server."""

    model: str
    base_url: str | None = None


class SeatEnvironment(PlainEnvironment):
    """Games in which the policy plays every seat, except those that `frozen(row)` gives to other models.

    `start(row)` begins a game. The calls of each seat become samples of their own, with its reward; the advantage
    compares a seat with the same seat of other games. The reward of a rollout is that of its first trained seat, and
    every seat has a metric `reward_<seat>`. A game ends after `max_turns` moves at the latest: `rewards` must not fail
    then.
    """

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
        while (seat := game.seat) is not None and rollout.num_turns < self.max_turns:
            other = frozen.get(seat)
            if seat not in conversations:
                conversations[seat] = client if other is None else self._open_frozen(client, other)
            messages = game.messages()
            name = model if other is None else other.model
            answer = await conversations[seat].chat.completions.create(model=name, messages=messages, **request)
            message = read_message(answer.choices[0].message)
            completion += [*messages[-1:], message] if rollout.num_turns else [message]
            rollout.num_turns += 1
            if other is None:
                rollout.completion_tokens = add_usage(rollout.completion_tokens, answer)
                if (turn := read_turn(answer)) is not None:
                    turn.seat = seat
                    rollout.turns = [*rollout.turns, turn]
            game.move(str(message["content"]))
        rollout.completion = completion
        state["rewards"], state["trained"] = game.rewards(), [seat for seat in game.rewards() if seat not in frozen]

    def _open_frozen(self, client: Any, player: Frozen) -> Any:
        """A conversation of its own, so that its tokens do not count as sampled; a client per server, made once."""
        if player.base_url is None:
            return open_conversation(client)
        if player.base_url not in self._others:
            self._others[player.base_url] = client.with_options(base_url=player.base_url)
        return open_conversation(self._others[player.base_url])

    async def _score(self, rollout: Rollout, row: Row, state: dict[str, Any]) -> None:
        rollout.seat_rewards = {seat: float(reward) for seat, reward in state["rewards"].items()}
        rollout.metrics = {f"reward_{seat}": reward for seat, reward in rollout.seat_rewards.items()}
        rollout.reward = rollout.seat_rewards[state["trained"][0]] if state["trained"] else 0.0
