"""The package anthropic: Messages."""

import asyncio
import json

import anthropic
from checks import (
    ADD_SCHEMA,
    ASK,
    CITY,
    CITY_SCHEMA,
    ENDLESS,
    KEY,
    MODEL,
    URL,
    cancelled,
    error_of,
    main,
    sum_of,
)

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
ADD_TOOL = {"name": "add", "description": "Adds two numbers.", "input_schema": ADD_SCHEMA}


def create(messages=ASK, **options):
    return client.messages.create(model=MODEL, max_tokens=100, messages=messages, **options)


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


def chat():
    return text_of(create())


def stream():
    with client.messages.stream(model=MODEL, max_tokens=100, messages=ASK) as events:
        texts = list(events.text_stream)
        assert "".join(texts) == text_of(events.get_final_message())
    return texts


def tools():
    messages, calls = list(ASK), []
    while True:
        answer = create(messages, tools=[ADD_TOOL])
        messages.append({"role": "assistant", "content": answer.content})
        used = [block for block in answer.content if block.type == "tool_use"]
        if not used:
            return {"calls": calls, "text": text_of(answer)}
        results = []
        for block in used:
            calls.append(block.input)
            result = {"type": "tool_result", "tool_use_id": block.id, "content": sum_of(block.input)}
            results.append(result)
        messages.append({"role": "user", "content": results})


def required():
    [block] = create(tools=[ADD_TOOL], tool_choice={"type": "any"}).content
    return block.input


def structured():
    answer = create(
        [{"role": "user", "content": CITY}],
        output_config={"format": {"type": "json_schema", "schema": CITY_SCHEMA}},
    )
    return json.loads(text_of(answer))


async def parallel():
    asking = anthropic.AsyncAnthropic(base_url=URL, api_key=KEY)
    answers = [asking.messages.create(model=MODEL, max_tokens=100, messages=ASK) for _ in range(8)]
    return [text_of(each) for each in await asyncio.gather(*answers)]


async def cancel():
    asking = anthropic.AsyncAnthropic(base_url=URL, api_key=KEY)
    messages = [{"role": "user", "content": ENDLESS}]
    return await cancelled(
        asking.messages.create(model=MODEL, max_tokens=20_000, messages=messages, timeout=600)
    )


def models():
    return [model.id for model in client.models.list()]


def count():
    """Tokens of a request, and what its answer says of them."""
    counted = client.messages.count_tokens(model=MODEL, messages=ASK, tools=[ADD_TOOL]).input_tokens
    usage = create(tools=[ADD_TOOL]).usage
    return [counted, usage.input_tokens + usage.cache_read_input_tokens]


def lacks():
    return error_of(lambda: create(tools=[{"type": "web_search_20250305", "name": "web_search"}]))


if __name__ == "__main__":
    main()
