"""litellm: chat completions as `openai/…`, and Messages as `anthropic/…`."""

import asyncio
import json
from functools import partial

import litellm
from checks import (
    ASK,
    BASE,
    CITY,
    CITY_SCHEMA,
    ENDLESS,
    KEY,
    MODEL,
    QUESTION,
    URL,
    cancelled,
    chat_round_trip,
    error_of,
    main,
)

OPENAI = {"model": f"openai/{MODEL}", "api_base": BASE, "api_key": KEY, "num_retries": 0}
ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": KEY, "num_retries": 0}
litellm.suppress_debug_info = True


def chat():
    return litellm.completion(**OPENAI, messages=ASK).choices[0].message.content


def stream():
    events = litellm.completion(**OPENAI, messages=ASK, stream=True)
    return [event.choices[0].delta.content or "" for event in events]


def round_trip(**provider):
    return chat_round_trip(partial(litellm.completion, **provider))


def tools():
    return round_trip(**OPENAI)


def structured():
    kind = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY_SCHEMA, "strict": True}}
    asked = [{"role": "user", "content": CITY}]
    answer = litellm.completion(**OPENAI, messages=asked, response_format=kind)
    return json.loads(answer.choices[0].message.content)


async def parallel():
    answers = await asyncio.gather(*[litellm.acompletion(**OPENAI, messages=ASK) for _ in range(8)])
    return [each.choices[0].message.content for each in answers]


async def cancel():
    return await cancelled(litellm.acompletion(**OPENAI, messages=[{"role": "user", "content": ENDLESS}]))


def models():
    found = litellm.get_valid_models(
        check_provider_endpoint=True, custom_llm_provider="openai", api_key=KEY, api_base=BASE
    )
    return [name.removeprefix("openai/") for name in found]


def lacks():
    return error_of(lambda: litellm.completion(**OPENAI, messages=ASK, logit_bias={"5": 3}))


def messages_chat():
    return litellm.completion(**ANTHROPIC, messages=ASK, max_tokens=100).choices[0].message.content


def messages_stream():
    events = litellm.completion(**ANTHROPIC, messages=ASK, max_tokens=100, stream=True)
    return [event.choices[0].delta.content or "" for event in events]


def messages_tools():
    return round_trip(**ANTHROPIC, max_tokens=100)


def responses_chat():
    return litellm.responses(**OPENAI, input=QUESTION).output[-1].content[0].text


if __name__ == "__main__":
    main()
