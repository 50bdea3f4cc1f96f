"""Tokens in, tokens out: for any conversation, tools and template, sampled tokens are never re-tokenized."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from fake_transport import END, OPEN, PAIR, Wire, check, decode, encode, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.training.agent_integration import rollout_to_samples
from rollouts.training.environments import PlainEnvironment
from rollouts.training.types import Sample, Status

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
ARGS = {"logprobs": True, "temperature": 1.0, "extra_body": {"return_token_ids": True}}


def talk(wire: Wire, replies: list[list[dict[str, Any]]], tools: bool = False, **args: Any) -> tuple[Any, list[Sample]]:
    """A rollout with these environment `replies`, and its samples."""

    def respond(messages: list[dict[str, Any]], row: Any, state: dict[str, Any]) -> list[dict[str, Any]]:
        number = state["turns"] = state.get("turns", 0) + 1
        return replies[number - 1] if number <= len(replies) else []

    environment = PlainEnvironment(
        [{"prompt": "hi 12"}], lambda completion: 1.0, respond=respond, max_turns=99, tools=TOOLS if tools else None
    )
    [rollout] = anyio.run(environment.run_group, environment.rows()[0], wire, "m", [ARGS | args])
    return rollout, rollout_to_samples(rollout)


def test_the_second_turn_sends_sampled_tokens_and_a_bridge() -> None:
    """The model spells 12 as two tokens and stops without its end token: both stay as they are."""
    wire = Wire(script=[turn([ord("1"), ord("2")]), turn([65, END])], quirks=frozenset({"newline"}))
    _, [sample] = talk(wire, [[{"role": "user", "content": "34"}]])
    first, _, _ = wire.sampled[0]
    assert sample.tokens == [*first, 49, 50, END, 10, OPEN, ord("u"), PAIR + 34, END, 10, OPEN, ord("a"), 65, END]
    assert [path for path, _ in wire.seen].count("/chat/completions/tokens") == 1
    check(wire, [sample])


def test_an_end_token_after_a_space_is_not_repeated() -> None:
    """The template writes a space before the end token, as Llama 2's; the model does not sample it."""
    wire = Wire(script=[turn([65, END]), turn([66])], quirks=frozenset({"space"}))
    _, [sample] = talk(wire, [[{"role": "user", "content": "r"}], [{"role": "user", "content": "s"}]], max_tokens=2)
    assert decode(sample.tokens) == "[uhi 12 [aA[ur [aB [us [aB" and sample.tokens.count(END) == 5
    check(wire, [sample])


def test_a_template_that_drops_thoughts_opens_a_new_sample() -> None:
    wire = Wire(
        script=[turn([*encode("(x)y"), END], thought=True), turn([66, END])], quirks=frozenset({"drops thoughts"})
    )
    _, samples = talk(wire, [[{"role": "user", "content": "more"}]])
    assert len(samples) == 2 and decode(samples[1].tokens).endswith("[ay[umore[aB")
    check(wire, samples)
    wire = Wire(script=wire.script, quirks=wire.quirks)  # a tool's answer is no new question: the thoughts stay
    wire.script[0]["call"] = True
    _, samples = talk(wire, [[{"role": "tool", "content": "more", "tool_call_id": "c1"}]], tools=True)
    assert len(samples) == 1 and "(x)y" in decode(samples[0].tokens)
    check(wire, samples)


def test_history_that_the_environment_rewrote_opens_a_new_sample() -> None:
    wire = Wire(script=[turn([65, END])])
    conversation = wire.open_conversation()

    async def main() -> None:
        first = [{"role": "user", "content": "q"}]
        for messages in (first, [*first, {"role": "assistant", "content": "B"}, {"role": "user", "content": "r"}]):
            await conversation.chat.completions.create(model="m", messages=messages, **ARGS)

    anyio.run(main)
    assert [path for path, _ in wire.seen] == ["/chat/completions"] * 2


def test_turns_have_seeds_of_their_own() -> None:
    """An engine draws by seed and position: equal seeds would correlate turns with prompts of equal length."""
    seeds = []
    for _ in range(2):
        wire = Wire(script=[turn([65, END])])
        talk(wire, [[{"role": "user", "content": "r"}]] * 2, seed=7)
        seeds.append([body["seed"] for _, body in wire.seen if "seed" in body])
    assert seeds[0] == seeds[1] and seeds[0][0] == 7 and len(set(seeds[0])) == 3


def test_a_server_without_the_routes_gets_messages() -> None:
    wire = Wire(script=[turn([65, END])], has_tokens=False)
    rollout, samples = talk(wire, [[{"role": "user", "content": "r"}]] * 2)
    assert rollout.num_turns == 3 and not wire.supports_token_prompts and len(samples) == 1
    assert [path for path, _ in wire.seen].count("/chat/completions/tokens") == 1, "asked once"
    check(wire, samples)


def test_seq_len_ends_a_conversation_as_truncated() -> None:
    wire = Wire(script=[turn([65] * 8 + [END])], seq_len=40)
    rollout, [sample] = talk(wire, [[{"role": "user", "content": "r"}]] * 9)
    assert (rollout.status, rollout.stop_reason) == (Status.TRUNCATED, "length") and len(sample.tokens) == 40
    check(wire, [sample])
    wire = Wire(script=[turn([65] * 8 + [END])], seq_len=22)
    rollout, [sample] = talk(wire, [[{"role": "user", "content": "long question"}]] * 9)
    assert (rollout.status, rollout.stop_reason) == (Status.TRUNCATED, "prompt_too_long") and rollout.num_turns == 1
    check(wire, [sample])


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_limits_of_the_length_hold_in_every_turn(name: str) -> None:
    wire = Wire(script=[turn([65] * 8)], seq_len=60)
    conversation = wire.open_conversation()

    async def main() -> None:
        messages = [{"role": "user", "content": "q"}]
        for _ in range(2):
            answer = await conversation.chat.completions.create(model="m", messages=messages, **{name: 3}, **ARGS)
            text = answer.choices[0].message.content
            messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "r"}]

    anyio.run(main)
    assert [path for path, _ in wire.seen].count("/chat/completions/tokens") == 1
    assert [len(ids) for _, ids, _ in wire.sampled] == [3, 3]


@pytest.mark.parametrize("limits", [{}, {"max_tokens": 30}, {"max_completion_tokens": 25}])
def test_min_tokens_fit_the_room_that_is_left(limits: dict[str, int]) -> None:
    wire = Wire(script=[turn([65] * 9 + [END]), turn([66, END])], seq_len=40)
    extra = {"return_token_ids": True, "min_tokens": 20}
    _, samples = talk(wire, [[{"role": "user", "content": "more"}]], extra_body=extra, **limits)
    [first, second] = [body for _, body in wire.seen if "min_tokens" in body]
    assert (first["min_tokens"], second["min_tokens"]) == (20, 12)
    check(wire, samples)


def continue_text(wire: Wire, text: str, *stop: str) -> list[int]:
    """The prompt tokens of the second completion, of `text`; the first one is of "a"."""
    conversation = wire.open_conversation()

    async def main() -> list[int]:
        args = {"model": "m", "logprobs": 1, "stop": stop, "extra_body": {"return_token_ids": True}}
        await conversation.completions.create(prompt="a", **args)
        answer = await conversation.completions.create(prompt=text, **args)
        return list(answer.choices[0].prompt_token_ids)

    return anyio.run(main)


def test_text_without_a_limit_has_that_of_the_context() -> None:
    wire = Wire(script=[turn([65])])
    continue_text(wire, "aA b")
    assert [body["max_tokens"] for path, body in wire.seen if path == "/completions"] == [None, None]


def test_plain_completions_go_on_as_tokens_too() -> None:
    assert continue_text(Wire(script=[turn([49, 50])]), "a12 34") == [ord("a"), 49, 50, ord(" "), PAIR + 34]


@pytest.mark.parametrize(
    ("suffix", "expected"),
    [
        (";34", [ord("a"), 49, ord(";"), PAIR + 34]),  # the environment writes the stop string, the model sampled it
        (";", [ord("a"), 49, ord(";")]),
        (" 34", [ord("a"), 49, ord(" "), PAIR + 34]),
    ],
)
def test_a_stop_string_stands_once_in_the_next_prompt(suffix: str, expected: list[int]) -> None:
    wire = Wire(script=[turn([49, ord(";")])])
    assert continue_text(wire, "a1" + suffix, ";") == expected
    assert ("/tokenize" in [path for path, _ in wire.seen]) == suffix.startswith(";")


def test_a_detokenizer_may_drop_the_first_space() -> None:
    """As that of Llama 2; the text of a completion has it."""

    class Llama2(Wire):
        def answer(self, path: str, body: Any) -> dict[str, Any]:
            found: dict[str, Any] = super().answer(path, body)
            return {"prompt": found["prompt"].removeprefix(" ")} if path == "/detokenize" else found

    wire = Llama2(script=[turn([ord(" "), 49, 50, ord(";")])])
    assert continue_text(wire, "a 12;34", ";") == [ord("a"), ord(" "), 49, 50, ord(";"), PAIR + 34]


def test_a_continued_text_gets_no_space_of_the_tokenizer() -> None:
    """That of Llama 2 puts a space before every text."""

    class Llama2(Wire):
        def answer(self, path: str, body: Any) -> dict[str, Any]:
            return super().answer(path, body | ({"prompt": f" {body['prompt']}"} if path == "/tokenize" else {}))

    wire = Llama2(script=[turn([49, 50])])
    for _ in range(2):
        assert continue_text(wire, "a12;34 b") == [ord("a"), 49, 50, ord(";"), PAIR + 34, ord(" "), ord("b")]
    assert [path for path, _ in wire.seen].count("/tokenize") == 5, "three of them find the space, once per server"


def test_text_behind_a_stop_string_is_not_sent_back() -> None:
    assert continue_text(Wire(script=[turn([PAIR + 12])]), "a1x", "1") == encode("a1x")


texts = st.text("12ab()\n", max_size=5)
sampled_ids = st.lists(st.sampled_from([49, 50, PAIR + 12, PAIR + 21, 97, 98, 40, 41, 10, OPEN, END]), max_size=5)
answers = st.builds(
    lambda ids, end, thought, call: turn(ids + [END] * end, thought=thought, call=call),
    sampled_ids,
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
reply = st.lists(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "tool", "system"]), texts),
    min_size=1,
    max_size=2,
)
quirks = st.frozensets(st.sampled_from(["newline", "bare", "space", "drops thoughts", "default system", "strips"]))


@settings(deadline=None, max_examples=60)
@given(quirks, st.lists(answers, min_size=1, max_size=5), st.lists(reply, max_size=4), st.booleans(), st.integers(1, 6))
def test_any_conversation_keeps_every_sampled_token_once(
    quirks: frozenset[str], script: list[dict[str, Any]], replies: list[Any], tools: bool, max_tokens: int
) -> None:
    wire = Wire(quirks=quirks, script=script)
    _, samples = talk(wire, replies, tools, max_tokens=max_tokens)
    check(wire, samples)
    for path, body in wire.seen:
        if path == "/chat/completions/tokens":  # begins with a whole earlier turn, exactly as it was sampled
            assert any(body["tokens"][: len(p) + len(c)] == p + c for p, c, _ in wire.sampled)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["", "newline", "default system"]), st.lists(sampled_ids, min_size=1, max_size=5), st.lists(reply)
)
def test_a_template_that_only_appends_gives_one_sample(quirk: str, script: list[list[int]], replies: list[Any]) -> None:
    """However the model spelt its answers."""
    wire = Wire(quirks=frozenset({quirk}), script=[turn([*ids, END]) for ids in script])
    _, samples = talk(wire, replies)
    check(wire, samples)
    assert len(samples) == 1
