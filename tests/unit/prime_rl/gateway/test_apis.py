"""The APIs of the gateway, with the stock OpenAI client and with Anthropic's wire format."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest
from recorded_client import CALL, RecordedClient

from prime_rl.gateway.chat import ChatRequest, RequestError, encode_loose
from prime_rl.gateway.server import Gateway
from prime_rl.gateway.session import Session
from rollouts.training.environments.answers import AnswerMessage, Choice, FunctionCall, ToolCall

SAMPLING = {"temperature": 0.7, "max_tokens": 50, "seed": 3, "logprobs": True, "extra_body": {"return_token_ids": True}}
TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
CHAT_TOOL = {"type": "function", "function": TOOL}
USER = {"role": "user", "content": "a"}
ANTHROPIC_TOOL = {"name": "add", "description": "Adds.", "input_schema": TOOL["parameters"]}


def serve(client: RecordedClient, work: Callable[[Session, httpx.AsyncClient], Awaitable[Any]]) -> Any:
    """Run `work` with a session and an HTTP client at its address."""

    async def run() -> Any:
        gateway, session = Gateway(), Session(client, "policy", SAMPLING)
        gateway.sessions["s"] = session
        transport = httpx.ASGITransport(gateway)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway/sessions/s") as http:
            return await work(session, http)

    return asyncio.run(run())


def stock_openai(session: Session, http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    base_url = "http://gateway/sessions/s/v1"
    return openai.AsyncOpenAI(api_key=session.key, base_url=base_url, http_client=http, max_retries=0)


def test_the_sampling_of_the_run_replaces_that_of_the_agent() -> None:
    client = RecordedClient()

    async def work(session: Session, http: httpx.AsyncClient) -> None:
        stock = stock_openai(session, http)
        chat = [{"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "short."}]}]
        answer = await stock.chat.completions.create(model="gpt-5", messages=chat, temperature=0, max_tokens=90, seed=1)
        assert (answer.model, answer.choices[0].message.content, answer.usage.total_tokens) == ("gpt-5", "Hello.", 5)
        await stock.chat.completions.create(model="gpt-5", messages=chat, max_completion_tokens=20)

    serve(client, work)
    first, second = client.requests
    assert first["messages"] == [{"role": "system", "content": "Be short."}]
    assert (first["temperature"], first["max_completion_tokens"], first["model"]) == (0.7, 50, "policy")
    assert second["max_completion_tokens"] == 20
    assert first["seed"] != second["seed"], "the same request again is another draw"


def test_the_token_limit_of_an_agent_bounds_min_tokens() -> None:
    client = RecordedClient()
    session = Session(client, "policy", {"extra_body": {"min_tokens": 8}})
    for limit in (None, 5):
        asyncio.run(session.complete(ChatRequest([{"role": "user"}], max_tokens=limit)))
    assert [request["extra_body"]["min_tokens"] for request in client.requests] == [8, 5]


@pytest.mark.parametrize("stream", [False, True])
def test_chats_with_tools_pass_the_stock_client(stream: bool) -> None:
    client = RecordedClient([CALL], "Three.")

    async def ask(stock: openai.AsyncOpenAI, messages: list[Any]) -> Any:
        options = {"model": "m", "messages": messages, "tools": [CHAT_TOOL]}
        if not stream:
            return (await stock.chat.completions.create(**options)).choices[0].message
        async with stock.chat.completions.stream(**options) as events:
            return (await events.get_final_completion()).choices[0].message

    async def work(session: Session, http: httpx.AsyncClient) -> Session:
        stock, messages = stock_openai(session, http), [{"role": "user", "content": "1 + 2?"}]
        message = await ask(stock, messages)
        assert message.tool_calls[0].function.arguments == CALL.function.arguments
        messages += [message.model_dump(), {"role": "tool", "tool_call_id": "call_1", "content": "3"}]
        assert (await ask(stock, messages)).content == "Three."
        return session

    session = serve(client, work)
    assert client.requests[1]["messages"][1] == {"role": "assistant", "content": "", "tool_calls": [CALL.model_dump()]}
    assert [turn.completion_ids for turn in session.turns] == [[1, 7, 8], [2, 7, 8]]
    assert session.num_unmatched == 0


@pytest.mark.parametrize("stream", [False, True])
def test_chats_return_the_reasoning(stream: bool) -> None:
    message = AnswerMessage(content="Three.", reasoning_content="1 + 2")

    async def work(session: Session, http: httpx.AsyncClient) -> Any:
        chats, options = stock_openai(session, http).chat.completions, {"model": "m", "messages": [{"role": "user"}]}
        if not stream:
            return (await chats.create(**options)).choices[0].message
        async with chats.stream(**options) as events:
            return (await events.get_final_completion()).choices[0].message

    answer = serve(RecordedClient(Choice(message=message, finish_reason="stop")), work)
    assert (answer.role, answer.reasoning_content, answer.content) == ("assistant", "1 + 2", "Three.")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
def test_responses_with_tools_pass_the_stock_client(stream: bool, by_id: bool) -> None:
    client = RecordedClient([CALL], "Three.")

    async def ask(stock: openai.AsyncOpenAI, **options: Any) -> Any:
        options |= {"model": "m", "instructions": "Add.", "tools": [{"type": "function", "strict": True, **TOOL}]}
        if not stream:
            return await stock.responses.create(**options)
        async with stock.responses.stream(**options) as events:
            return await events.get_final_response()

    async def work(session: Session, http: httpx.AsyncClient) -> Session:
        stock = stock_openai(session, http)
        question = {"role": "user", "content": "1 + 2?"}
        first = await ask(stock, input=[question])
        [call] = first.output
        assert (call.name, call.arguments) == ("add", CALL.function.arguments)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        history = [] if by_id else [question, call.model_dump(exclude={"parsed_arguments"})]
        extra = {"previous_response_id": first.id} if by_id else {}
        assert (await ask(stock, input=[*history, result], **extra)).output_text == "Three."
        return session

    session = serve(client, work)
    assert [m["role"] for m in client.requests[1]["messages"]] == ["system", "user", "assistant", "tool"]
    assert client.requests[1]["messages"][2]["tool_calls"] == [CALL.model_dump()]
    assert session.num_unmatched == 0


def test_anthropic_messages_keep_the_text_of_sampled_calls() -> None:
    client = RecordedClient([CALL], "Three.")

    async def work(session: Session, http: httpx.AsyncClient) -> Session:
        headers = {"x-api-key": session.key}
        body = {"model": "claude", "max_tokens": 30, "system": "Add.", "tools": [ANTHROPIC_TOOL]}
        messages: list[Any] = [{"role": "user", "content": "1 + 2?"}]
        first = (await http.post("/v1/messages", headers=headers, json={**body, "messages": messages})).json()
        assert (first["stop_reason"], first["usage"]) == ("tool_use", {"input_tokens": 2, "output_tokens": 3})
        assert first["content"] == [{"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1, "b": 2}}]
        result = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "3"}]}
        messages += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        second = (await http.post("/v1/messages", headers=headers, json={**body, "messages": messages})).json()
        assert (second["content"], second["stop_reason"]) == ([{"type": "text", "text": "Three."}], "end_turn")
        return session

    session = serve(client, work)
    system, _, assistant, tool = client.requests[1]["messages"]
    assert (system["content"], tool) == ("Add.", {"role": "tool", "tool_call_id": "call_1", "content": "3"})
    assert assistant["tool_calls"] == [CALL.model_dump()], "with its own spaces, not those of the agent's JSON"
    assert session.num_unmatched == 0


def test_numbers_as_javascript_writes_them_are_no_edit() -> None:
    def write(arguments: str) -> bytes:
        call = {"id": "call_1", "function": {"name": "f", "arguments": arguments}}
        return encode_loose({"role": "assistant", "content": "", "tool_calls": [call]})

    assert write('{"x": 2.0, "y": [{"z": -0.0}], "w": 1E2}') == write('{"x":2,"y":[{"z":0}],"w":100}')
    assert write('{"x": 1e300}') == write('{"x":1e+300}') != write('{"x": 1.5}') != write('{"x": 1}')


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("[" * 5000, {"arguments": "[" * 5000}),
        (f'{{"a": {2**64}, "b": [-{10**40}]}}', {"a": 2**64, "b": [-(10**40)]}),
    ],
    ids=["deep", "long integers"],
)
def test_messages_have_arguments_of_any_size(text: str, read: dict[str, Any]) -> None:
    client = RecordedClient([ToolCall("call_1", "function", FunctionCall("add", text))])

    async def work(session: Session, http: httpx.AsyncClient) -> Session:
        body = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
        answer = (await http.post("/v1/messages", headers={"x-api-key": session.key}, json=body)).json()
        assert answer["content"][0]["input"] == read
        return session

    assert len(serve(client, work).turns) == 1


def test_a_body_that_is_not_unicode_is_refused() -> None:
    async def work(session: Session, http: httpx.AsyncClient) -> httpx.Response:
        body = b'{"messages": [{"role": "user", "content": "\xff"}]}'
        return await http.post("/v1/messages", headers={"x-api-key": session.key}, content=body)

    reply = serve(RecordedClient(), work)
    assert reply.status_code == 400 and "the request is not valid" in reply.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_messages_name_the_stop_sequence(stream: bool) -> None:
    async def stopped(request: dict[str, Any]) -> Choice:
        assert request["stop"] == ["END", "\n"]
        return Choice(message=AnswerMessage(content="Hel"), finish_reason="stop", stop_reason="END")

    async def work(session: Session, http: httpx.AsyncClient) -> str:
        body = {"model": "c", "max_tokens": 9, "stream": stream, "stop_sequences": ["END", "\n"]}
        body["messages"] = [{"role": "user", "content": "Hi"}]
        return (await http.post("/v1/messages", headers={"x-api-key": session.key}, json=body)).text

    text = serve(RecordedClient(stopped), work)
    found = json.loads(text.splitlines()[-5][6:])["delta"] if stream else json.loads(text)
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "END")


def test_anthropic_streams_join_to_the_message() -> None:
    async def work(session: Session, http: httpx.AsyncClient) -> str:
        body = {"model": "c", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
        return (await http.post("/v1/messages", headers={"x-api-key": session.key}, json=body)).text

    text = serve(RecordedClient(), work)
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    names = "message_start content_block_start content_block_delta content_block_stop message_delta message_stop"
    assert [event["type"] for event in events] == names.split()
    assert events[2]["delta"] == {"type": "text_delta", "text": "Hello."}
    assert events[4]["delta"]["stop_reason"] == "end_turn"


def test_white_space_is_not_an_edit() -> None:
    client = RecordedClient(" Hello.\n", [CALL], "Three.")

    async def work(session: Session, http: httpx.AsyncClient) -> Session:
        stock, messages = stock_openai(session, http), [{"role": "user", "content": "Hi"}]
        await stock.chat.completions.create(model="m", messages=messages)
        messages += [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "1 + 2?"}]
        await stock.chat.completions.create(model="m", messages=messages, tools=[CHAT_TOOL])
        spaced = {"name": "add", "arguments": '{"a": 1, "b": 2}'}
        messages += [{"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": spaced}]}]
        messages += [{"role": "tool", "tool_call_id": "call_1", "content": "3"}]
        await stock.chat.completions.create(model="m", messages=messages, tools=[CHAT_TOOL])
        return session

    session = serve(client, work)
    _, first, _, second, _ = client.requests[2]["messages"]
    assert (first["content"], second["tool_calls"]) == (" Hello.\n", [CALL.model_dump()]), "as the engine wrote them"
    assert session.num_unmatched == 0


def test_a_retry_gets_the_answer_that_was_lost() -> None:
    client = RecordedClient("one", "two", "three")

    async def work(session: Session, http: httpx.AsyncClient) -> list[str]:
        stock, options = stock_openai(session, http), {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
        retries = ("0", "1", "0", "1")
        answers = [
            await stock.chat.completions.create(**options, extra_headers={"x-stainless-retry-count": count})
            for count in retries
        ]
        return [answer.choices[0].message.content for answer in answers]

    assert serve(client, work) == ["one", "one", "two", "two"]
    assert len({request["seed"] for request in client.requests}) == 2


def test_seeds_of_branches_differ_and_repeat_in_another_run() -> None:
    """Equal requests draw again; ids of tool calls, which are random, change no seed."""

    async def run(id: str) -> list[int]:
        client = RecordedClient()
        session = Session(client, "policy", SAMPLING)
        call = {"id": id, "type": "function", "function": {"name": "add", "arguments": "{}"}}
        called = [{"role": "user"}, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": id}]
        for messages in ([{"role": "user", "content": text}] for text in ("ab", "ba", "ab")):
            await session.complete(ChatRequest(messages))
        await session.complete(ChatRequest(called))
        return [request["seed"] for request in client.requests]

    seeds = asyncio.run(run("call_1"))
    assert len(set(seeds)) == 4 and seeds == asyncio.run(run("call_2"))


def test_a_retry_gets_no_answer_of_another_request() -> None:
    async def never_answer(request: dict[str, Any]) -> str:
        return await asyncio.Event().wait() and ""

    async def run() -> list[str]:
        session, messages = (
            Session(RecordedClient("one", never_answer, "two", "three"), "policy", SAMPLING),
            [{"role": "user"}],
        )
        answers = [await session.complete(ChatRequest(messages))]
        timed_out = asyncio.create_task(session.complete(ChatRequest(messages)))
        await asyncio.sleep(0)
        timed_out.cancel()
        await asyncio.wait([timed_out])
        for request in (ChatRequest(messages), ChatRequest(messages, max_tokens=5), ChatRequest(messages)):
            answers.append(await session.complete(request, is_retry=True))
        return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(run()) == ["one", "two", "three", "two"]


def test_a_compacted_history_goes_on_after_an_overlong_one() -> None:
    response = httpx.Response(400, text="maximum context length is 9", request=httpx.Request("POST", "http://engine"))
    overlong = openai.BadRequestError("too long", response=response, body=None)

    async def work(session: Session, http: httpx.AsyncClient) -> Session:
        stock, messages = stock_openai(session, http), [{"role": "user", "content": "Hi"}]
        await stock.chat.completions.create(model="m", messages=messages)
        with pytest.raises(openai.BadRequestError) as caught:
            await stock.chat.completions.create(model="m", messages=[*messages, *messages])
        assert caught.value.code == "context_length_exceeded" and session.is_overlong
        await stock.chat.completions.create(model="m", messages=messages)
        return session

    session = serve(RecordedClient("one", overlong, "two"), work)
    assert (session.error, session.is_overlong, len(session.turns)) == (None, False, 2)


def test_overlong_prompts_are_refused_in_the_words_of_vendors() -> None:
    """LiteLLM and Claude Code recognize them by these."""
    text = "This model's maximum context length is 9 tokens, but the prompt has 12 tokens: shorten it."
    response = httpx.Response(400, json={"error": {"message": text}}, request=httpx.Request("POST", "http://engine"))
    overlong = openai.BadRequestError("too long", response=response, body=None)

    async def work(session: Session, http: httpx.AsyncClient) -> list[str]:
        body, key = {"messages": [USER], "max_tokens": 5}, {"x-api-key": session.key}
        replies = [await http.post(path, headers=key, json=body) for path in ("/v1/chat/completions", "/v1/messages")]
        return [reply.json()["error"]["message"] for reply in replies]

    assert serve(RecordedClient(overlong, overlong), work) == [text, f"prompt is too long: {text}"]


def test_the_recorded_conversation_has_reasoning() -> None:
    async def work(session: Session, http: httpx.AsyncClient) -> Session:
        messages = [{"role": "user", "content": "Hi"}]
        await stock_openai(session, http).chat.completions.create(model="m", messages=messages)
        messages += [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Go on"}]
        await stock_openai(session, http).chat.completions.create(model="m", messages=messages)
        return session

    client = RecordedClient(Choice(message=AnswerMessage(content="Hello.", reasoning_content="a")), "Bye.")
    session = serve(client, work)
    said = {"role": "assistant", "content": "Hello."}
    assert session.split_last()[1][0] == said | {"reasoning_content": "a"}
    assert (client.requests[1]["messages"][1], session.num_unmatched) == (said, 0)


@pytest.mark.parametrize(("start", "stop", "expected"), [(0, 6, "0123"), (0, 4, "013"), (2, 6, "123"), (0, 0, "3")])
def test_equal_answers_keep_their_own_reasoning(start: int, stop: int, expected: str) -> None:
    """Also in a branch, and after messages that the agent has left out."""

    async def work(session: Session, http: httpx.AsyncClient) -> Session:
        history: list[dict[str, Any]] = []
        for text in "cde":
            history += [{"role": "user", "content": text}]
            await stock_openai(session, http).chat.completions.create(model="m", messages=history)
            history += [{"role": "assistant", "content": "Yes."}]
        messages = [*history[start:stop], USER]
        await stock_openai(session, http).chat.completions.create(model="m", messages=messages)
        return session

    thoughts = [AnswerMessage(content="Yes.", reasoning_content=str(number)) for number in range(4)]
    completion = serve(RecordedClient(*(Choice(message=thought) for thought in thoughts)), work).split_last()[1]
    assert "".join(message.get("reasoning_content", "") for message in completion) == expected


def test_messages_that_an_agent_wrote_have_no_loss() -> None:
    async def work(session: Session, http: httpx.AsyncClient) -> Session:
        stock, messages = stock_openai(session, http), [USER]
        for text in ("one", "of the agent"):
            await stock.chat.completions.create(model="m", messages=messages)
            messages = [*messages, {"role": "assistant", "content": text}, USER]
        await stock.chat.completions.create(model="m", messages=messages)
        return session

    completion = serve(RecordedClient("one", "two", "three"), work).split_last()[1]
    answers = [message for message in completion if message["role"] == "assistant"]
    assert [message["content"] for message in answers] == ["one", "of the agent", "three"]
    assert [message.get("weight") for message in answers] == [None, 0, None]


def test_an_edited_history_is_counted() -> None:
    async def work(session: Session, http: httpx.AsyncClient) -> Session:
        stock = stock_openai(session, http)
        for content in ("Hello.", "Hello!"):
            messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
            if content == "Hello.":
                await stock.chat.completions.create(model="m", messages=messages[:1])
            await stock.chat.completions.create(model="m", messages=[*messages, {"role": "user", "content": "Go on"}])
        return session

    session = serve(RecordedClient(), work)
    assert (len(session.conversations), session.num_unmatched) == (3, 1)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"messages": [], "model": "m"}, "messages is empty"),
        ({"messages": [{"role": "user", "content": "a"}], "n": 2}, "n must be 1"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "'image_url' is not"),
        ({"messages": [{"role": "user", "content": "a"}], "logprobs": True}, "logprobs is not supported"),
        ({"messages": ["a"]}, "Expected `object`, got `str` - at `$.messages[0]`"),
        ({}, "missing required field `messages`"),
        ({"messages": [{"content": "a"}]}, "a message must have a role"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": "add"}, "at `$.tools`"),
    ],
)
def test_requests_that_cannot_be_trained_are_refused(body: dict[str, Any], text: str) -> None:
    client = RecordedClient()

    async def work(session: Session, http: httpx.AsyncClient) -> httpx.Response:
        return await http.post("/v1/chat/completions", headers={"authorization": f"Bearer {session.key}"}, json=body)

    reply = serve(client, work)
    assert (reply.status_code, reply.headers["x-should-retry"]) == (400, "false")
    assert text in reply.json()["error"]["message"] and not client.requests


@pytest.mark.parametrize(
    ("path", "change", "text"),
    [
        ("responses", {"conversation": "conv_1"}, "conversation is stored at the provider"),
        ("responses", {"prompt": {"id": "pmpt_1"}}, "prompt is stored at the provider"),
        ("messages", {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format is not supported"),
        ("messages", {"output_format": {"type": "json_schema"}}, "output_config.format is not supported"),
        (
            "messages",
            {"mcp_servers": [{"type": "url", "url": "http://a", "name": "a"}]},
            "mcp_servers run at the provider",
        ),
        ("messages", {"messages": [USER, {"role": "assistant", "content": "{"}]}, "whose beginning cannot be set"),
        ("messages", {"tool_choice": {"type": "some"}}, "tool_choice of type 'some' is not supported"),
        ("messages", {"tool_choice": {"type": ["any"]}}, "is not supported: give 'auto', 'any'"),
    ],
)
def test_fields_that_would_be_ignored_are_refused(path: str, change: dict[str, Any], text: str) -> None:
    client = RecordedClient()

    async def work(session: Session, http: httpx.AsyncClient) -> httpx.Response:
        body = {"input": "a", "messages": [USER], "max_tokens": 9, **change}
        return await http.post(f"/v1/{path}", headers={"x-api-key": session.key}, json=body)

    reply = serve(client, work)
    assert reply.status_code == 400 and text in reply.json()["error"]["message"] and not client.requests


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("auto", None),
        ("required", "required"),
        ({"type": "function", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}, RequestError),
        ({"type": "function"}, RequestError),
    ],
)
def test_tool_choices_of_responses(choice: Any, sent: Any) -> None:
    client = RecordedClient()

    async def work(session: Session, http: httpx.AsyncClient) -> httpx.Response:
        body = {"model": "m", "input": "a", "tools": [{"type": "function", **TOOL}], "tool_choice": choice}
        return await http.post("/v1/responses", headers={"authorization": f"Bearer {session.key}"}, json=body)

    reply = serve(client, work)
    if sent is RequestError:
        assert reply.status_code == 400 and not client.requests
        assert f"tool_choice {choice!r} is not supported" in reply.json()["error"]["message"]
    else:
        assert reply.status_code == 200 and client.requests[0].get("tool_choice") == sent


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"tools": [CHAT_TOOL], "parallel_tool_calls": False}),
        ("responses", {"input": "a", "tools": [{"type": "function", **TOOL}], "parallel_tool_calls": False}),
        ("messages", {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
    ],
)
def test_single_calls_are_asked_of_the_engine(path: str, body: dict[str, Any]) -> None:
    client = RecordedClient()

    async def work(session: Session, http: httpx.AsyncClient) -> dict[str, Any]:
        asked = {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}], **body}
        return (await http.post(f"/v1/{path}", headers={"x-api-key": session.key}, json=asked)).json()

    answer = serve(client, work)
    assert client.requests[0]["parallel_tool_calls"] is False
    assert answer.get("parallel_tool_calls", False) is False


@pytest.mark.parametrize(
    ("style", "sent"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "json_object"}),
        (
            {"type": "json_schema", "name": "a", "schema": {"type": "object"}},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
        ),
        ({"type": "grammar"}, RequestError),
        ("json", RequestError),
    ],
)
def test_formats_of_responses(style: Any, sent: Any) -> None:
    client = RecordedClient()

    async def work(session: Session, http: httpx.AsyncClient) -> httpx.Response:
        body = {"model": "m", "input": "a", "text": {"format": style}}
        return await http.post("/v1/responses", headers={"authorization": f"Bearer {session.key}"}, json=body)

    reply = serve(client, work)
    if sent is RequestError:
        assert reply.status_code == 400 and not client.requests
        assert f"text.format {style!r} is not supported" in reply.json()["error"]["message"]
    else:
        assert reply.status_code == 200 and client.requests[0].get("response_format") == sent


def test_another_key_or_an_ended_session_is_refused() -> None:
    async def work(session: Session, http: httpx.AsyncClient) -> list[int]:
        body = {"messages": [{"role": "user", "content": "a"}]}
        right = {"authorization": f"Bearer {session.key}"}
        asked = [("s", {}), ("s", {"x-api-key": "session-x"}), ("t", right), ("s", right)]
        url = "http://gateway/sessions/{}/v1/chat/completions"
        return [(await http.post(url.format(name), headers=key, json=body)).status_code for name, key in asked]

    assert serve(RecordedClient(), work) == [401, 401, 404, 200]


def test_the_first_failure_of_the_engine_is_kept() -> None:
    failure = ConnectionError("refused")

    async def work(session: Session, http: httpx.AsyncClient) -> Session:
        with pytest.raises(openai.InternalServerError, match="ConnectionError: refused"):
            await stock_openai(session, http).chat.completions.create(
                model="m", messages=[{"role": "user", "content": "Hi"}]
            )
        return session

    assert serve(RecordedClient(failure), work).error is failure
