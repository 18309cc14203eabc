"""The package openai: chat completions, and Responses."""

import asyncio
import json

import openai
from checks import (
    ADD,
    ADD_TOOL,
    ASK,
    BASE,
    CITY,
    CITY_SCHEMA,
    ENDLESS,
    KEY,
    MODEL,
    QUESTION,
    cancelled,
    chat_round_trip,
    error_of,
    left,
    main,
    sum_of,
)

client = openai.OpenAI(base_url=BASE, api_key=KEY, max_retries=0)
ADD_OF_RESPONSES = {"type": "function", **ADD, "strict": True}
FORMAT = {"name": "city", "schema": CITY_SCHEMA, "strict": True}


def create(messages=ASK, **options):
    return client.chat.completions.create(model=MODEL, messages=messages, **options)


def chat():
    return create().choices[0].message.content


def stream():
    return [event.choices[0].delta.content or "" for event in create(stream=True) if event.choices]


def tools():
    return chat_round_trip(create)


def required():
    said = create(tools=[ADD_TOOL], tool_choice="required").choices[0].message
    return json.loads(said.tool_calls[0].function.arguments)


def structured():
    said = create(
        [{"role": "user", "content": CITY}], response_format={"type": "json_schema", "json_schema": FORMAT}
    )
    return json.loads(said.choices[0].message.content)


def json_object():
    said = create(
        [{"role": "user", "content": CITY}], response_format={"type": "json_object"}, max_tokens=400
    )
    return json.loads(said.choices[0].message.content)


async def parallel():
    asking = openai.AsyncOpenAI(base_url=BASE, api_key=KEY)
    answers = [asking.chat.completions.create(model=MODEL, messages=ASK) for _ in range(8)]
    return [each.choices[0].message.content for each in await asyncio.gather(*answers)]


def cancel():
    events = create([{"role": "user", "content": ENDLESS}], stream=True)
    return left(events, events.close)


def models():
    return [model.id for model in client.models.list()]


def lacks():
    return error_of(lambda: create(logit_bias={"5": 3}))


# ------------------------------------------------------------------------------------------------ Responses


def respond(asked=QUESTION, **options):
    return client.responses.create(model=MODEL, input=asked, **options)


def responses_chat():
    return respond().output_text


def responses_stream():
    with client.responses.stream(model=MODEL, input=QUESTION) as events:
        texts = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(texts) == events.get_final_response().output_text
    return texts


def responses_tools():
    items, calls = [{"role": "user", "content": QUESTION}], []
    while True:
        answer = respond(items, tools=[ADD_OF_RESPONSES])
        items += answer.output
        called = [item for item in answer.output if item.type == "function_call"]
        if not called:
            return {"calls": calls, "text": answer.output_text}
        for call in called:
            calls.append(json.loads(call.arguments))
            result = {"type": "function_call_output", "call_id": call.call_id, "output": sum_of(calls[-1])}
            items.append(result)


def responses_structured():
    return json.loads(respond(CITY, text={"format": {"type": "json_schema", **FORMAT}}).output_text)


async def responses_parallel():
    asking = openai.AsyncOpenAI(base_url=BASE, api_key=KEY)
    answers = [asking.responses.create(model=MODEL, input=QUESTION) for _ in range(8)]
    return [each.output_text for each in await asyncio.gather(*answers)]


async def responses_cancel():
    asking = openai.AsyncOpenAI(base_url=BASE, api_key=KEY)
    return await cancelled(asking.responses.create(model=MODEL, input=ENDLESS))


def responses_lacks():
    return error_of(lambda: respond(background=True))


if __name__ == "__main__":
    main()
