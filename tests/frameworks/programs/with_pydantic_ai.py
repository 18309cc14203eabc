"""pydantic-ai: its models for chat completions, Responses and Messages."""

import asyncio
from typing import Annotated, Literal

from checks import BASE, CITY, ENDLESS, KEY, MODEL, QUESTION, URL, cancelled, error_of, main
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, ModelSettings, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")  # else an object may go on without an end

    name: Annotated[str, Field(max_length=12)]
    size: Literal["small", "large"]
    people: int
    rivers: Annotated[list[str], Field(max_length=3)]


PROVIDER = OpenAIProvider(base_url=BASE, api_key=KEY)


def of_chat():
    return OpenAIChatModel(MODEL, provider=PROVIDER)


def of_responses():
    return OpenAIResponsesModel(MODEL, provider=PROVIDER)


def of_messages():
    return AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY))


def said(model):
    return Agent(model).run_sync(QUESTION).output


async def streamed(model):
    async with Agent(model).run_stream(QUESTION) as run:
        return [part async for part in run.stream_text(delta=True, debounce_by=None)]


def round_trip(model):
    calls, agent = [], Agent(model)

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        calls.append({"a": a, "b": b})
        return a + b

    return {"text": agent.run_sync(QUESTION).output, "calls": calls}


def filled(model, output):
    return Agent(model, output_type=output).run_sync(CITY).output.model_dump()


def chat():
    return said(of_chat())


async def stream():
    return await streamed(of_chat())


def tools():
    return round_trip(of_chat())


def structured():
    return filled(of_chat(), NativeOutput(City))


def structured_by_a_tool():
    """What pydantic-ai does by default: the model must call a tool."""
    return filled(of_chat(), ToolOutput(City))


async def parallel():
    agent = Agent(of_chat())
    return [each.output for each in await asyncio.gather(*[agent.run(QUESTION) for _ in range(8)])]


async def cancel():
    return await cancelled(Agent(of_chat()).run(ENDLESS))


async def models():
    return [model.id async for model in of_chat().client.models.list()]


def lacks():
    settings = ModelSettings(logit_bias={"5": 3})
    return error_of(lambda: Agent(of_chat()).run_sync(QUESTION, model_settings=settings))


def messages_chat():
    return said(of_messages())


async def messages_stream():
    return await streamed(of_messages())


def messages_tools():
    return round_trip(of_messages())


def responses_chat():
    return said(of_responses())


async def responses_stream():
    return await streamed(of_responses())


def responses_tools():
    return round_trip(of_responses())


def responses_structured():
    return filled(of_responses(), NativeOutput(City))


if __name__ == "__main__":
    main()
