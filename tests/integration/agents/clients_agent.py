"""Stock clients: python clients_agent.py KIND, where KIND is openai, responses, anthropic or agents.

In each of four rounds: a tool loop (streaming in every second task), two requests at once, a sub-agent, and a compacted
history that starts from a summary and goes on.
"""

import asyncio
import json
import sys

KIND = sys.argv[1]
NUM_ROUNDS = 4
TOOL = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
task = json.load(sys.stdin)
question, numbers = task["prompt"][0]["content"], task["info"]
stream = task["example_id"] % 2 == 1


def look_up(quantity: str, arguments: object) -> str:
    name = arguments.get("name") if isinstance(arguments, dict) else None
    return numbers.get(quantity, {}).get(str(name), "unknown")


def parse(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


async def openai_turn(client, messages):
    from openai import LengthFinishReasonError

    options = {
        "model": "any",
        "messages": messages,
        "tools": [{"type": "function", "function": {"name": name, "parameters": TOOL}} for name in numbers],
    }
    if stream:
        async with client.chat.completions.stream(**options) as events:
            try:
                message = (await events.get_final_completion()).choices[0].message
            except LengthFinishReasonError as error:
                message = error.completion.choices[0].message
    else:
        message = (await client.chat.completions.create(**options)).choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or []:
        content = look_up(call.function.name, parse(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return message.content or "", bool(message.tool_calls)


async def responses_turn(client, items):
    options = {
        "model": "any",
        "input": items,
        "tools": [{"type": "function", "name": name, "parameters": TOOL, "strict": False} for name in numbers],
    }
    if stream:
        async with client.responses.stream(**options) as events:
            response = await events.get_final_response()
    else:
        response = await client.responses.create(**options)
    calls = [item for item in response.output if item.type == "function_call"]
    items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
    for call in calls:
        output = look_up(call.name, parse(call.arguments))
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    return response.output_text, bool(calls)


async def anthropic_turn(client, messages):
    options = {
        "model": "any",
        "max_tokens": 100,
        "messages": messages,
        "tools": [{"name": name, "description": "", "input_schema": TOOL} for name in numbers],
    }
    if stream:
        async with client.messages.stream(**options) as events:
            message = await events.get_final_message()
    else:
        message = await client.messages.create(**options)
    messages.append(
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]}
    )
    calls = [block for block in message.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": look_up(call.name, call.input)} for call in calls
    ]
    if results:
        messages.append({"role": "user", "content": results})
    return "".join(block.text for block in message.content if block.type == "text"), bool(calls)


async def run_loop(turn, client, messages) -> str:
    for _ in range(3):
        text, has_calls = await turn(client, messages)
        if not has_calls:
            return text
    return ""


async def run_by_hand() -> None:
    if KIND == "anthropic":
        from anthropic import AsyncAnthropic

        client, turn = AsyncAnthropic(), anthropic_turn
    else:
        from openai import AsyncOpenAI

        client, turn = AsyncOpenAI(), openai_turn if KIND == "openai" else responses_turn
    user = {"role": "user", "content": question}
    helper = {"role": "user", "content": f"Helper: {question}"}  # the sub-agent
    for _ in range(NUM_ROUNDS):
        first, second, _ = await asyncio.gather(
            run_loop(turn, client, [user]), run_loop(turn, client, [user]), run_loop(turn, client, [helper])
        )
        messages = [{"role": "user", "content": f"So far: {first} {second}. {question}"}]
        await run_loop(turn, client, messages)
        messages.append(user)
        print(await run_loop(turn, client, messages))


async def run_agents_sdk() -> None:
    from agents import Agent, Runner, function_tool

    @function_tool
    def worth(name: str) -> str:
        return look_up("worth", {"name": name})

    @function_tool
    def mass(name: str) -> str:
        return look_up("mass", {"name": name})

    async def run(agent, text):
        if not stream:
            return await Runner.run(agent, text, max_turns=4)
        result = Runner.run_streamed(agent, text, max_turns=4)
        async for _ in result.stream_events():
            pass
        return result

    agent = Agent("worth", instructions="Answer.", model="any", tools=[worth, mass])
    helper = Agent("helper", instructions="Help.", model="any", tools=[worth, mass])
    for _ in range(NUM_ROUNDS):
        results = await asyncio.gather(run(agent, question), run(agent, question), run(helper, question))
        result = await run(agent, f"So far: {results[0].final_output}. {question}")
        history = [*result.to_input_list(), {"role": "user", "content": question}]
        print((await run(agent, history)).final_output)


asyncio.run(run_agents_sdk() if KIND == "agents" else run_by_hand())
