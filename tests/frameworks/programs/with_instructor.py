"""instructor: answers as objects, by tools and by schemas."""

import asyncio
from typing import Annotated, Literal

import instructor
import openai
from checks import ASK, BASE, CITY, ENDLESS, KEY, MODEL, cancelled, error_of, main
from instructor import Mode
from pydantic import BaseModel, ConfigDict, Field


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")  # else an object may go on without an end

    name: Annotated[str, Field(max_length=12)]
    size: Literal["small", "large"]
    people: int
    rivers: Annotated[list[str], Field(max_length=3)]


class Add(BaseModel):
    """Adds two numbers."""

    a: int
    b: int


plain = openai.OpenAI(base_url=BASE, api_key=KEY, max_retries=0)
ASK_CITY = [{"role": "user", "content": CITY}]


def client(mode):
    return instructor.from_openai(plain, mode=mode)


def chat():
    answer = client(Mode.TOOLS).create(model=MODEL, messages=ASK, response_model=None)
    return answer.choices[0].message.content


def stream():
    parts = client(Mode.TOOLS).create(model=MODEL, messages=ASK, response_model=None, stream=True)
    return [part.choices[0].delta.content or "" for part in parts if part.choices]


def required():
    """An object by a call of a tool by name."""
    return (
        client(Mode.TOOLS).create(model=MODEL, messages=ASK, response_model=Add, max_retries=0).model_dump()
    )


def structured():
    made = client(Mode.JSON_SCHEMA).create(model=MODEL, messages=ASK_CITY, response_model=City, max_retries=0)
    return made.model_dump()


def structured_stream():
    parts = client(Mode.JSON_SCHEMA).create_partial(model=MODEL, messages=ASK_CITY, response_model=City)
    return list(parts)[-1].model_dump()


async def parallel():
    asking = instructor.from_openai(openai.AsyncOpenAI(base_url=BASE, api_key=KEY), mode=Mode.TOOLS)
    answers = [asking.create(model=MODEL, messages=ASK, response_model=None) for _ in range(8)]
    return [each.choices[0].message.content for each in await asyncio.gather(*answers)]


async def cancel():
    asking = instructor.from_openai(openai.AsyncOpenAI(base_url=BASE, api_key=KEY), mode=Mode.TOOLS)
    messages = [{"role": "user", "content": ENDLESS}]
    return await cancelled(asking.create(model=MODEL, messages=messages, response_model=None))


def models():
    return [model.id for model in client(Mode.TOOLS).client.models.list()]


def lacks():
    return error_of(
        lambda: client(Mode.TOOLS).create(
            model=MODEL, messages=ASK, response_model=None, logit_bias={"5": 3}, max_retries=0
        )
    )


if __name__ == "__main__":
    main()
