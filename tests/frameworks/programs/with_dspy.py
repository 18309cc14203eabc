"""dspy, which asks by litellm."""

import asyncio
from typing import Annotated, Literal

import dspy
from checks import BASE, CITY, ENDLESS, KEY, QUESTION, cancelled, error_of, main
from pydantic import BaseModel, ConfigDict, Field


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")  # else an object may go on without an end

    name: Annotated[str, Field(max_length=12)]
    size: Literal["small", "large"]
    people: int
    rivers: Annotated[list[str], Field(max_length=3)]


# dspy asks for tools and schemas only of models that its table knows; the server answers under any name.
NAME = "openai/gpt-4o"


def model(**options):
    return dspy.LM(NAME, api_base=BASE, api_key=KEY, cache=False, num_retries=0, max_tokens=1000, **options)


def chat():
    [text] = model()(QUESTION)
    return text


async def fields():
    """The parts of an answer of a predictor, as its fields come: the model writes them by a schema."""
    dspy.configure(lm=model(), adapter=dspy.JSONAdapter())
    asked = dspy.streamify(dspy.Predict("question -> sum: int"))
    parts = [part async for part in asked(question=QUESTION)]
    text = "".join(p.choices[0].delta.content or "" for p in parts if hasattr(p, "choices"))
    return {"text": text, "sum": parts[-1].sum}


def tools():
    calls = []

    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        calls.append({"a": a, "b": b})
        return a + b

    class Ask(dspy.Signature):
        question: str = dspy.InputField()
        tools: list[dspy.Tool] = dspy.InputField()
        outputs: dspy.ToolCalls = dspy.OutputField()

    dspy.configure(lm=model(), adapter=dspy.ChatAdapter(use_native_function_calling=True))
    answer = dspy.Predict(Ask)(question=QUESTION, tools=[dspy.Tool(add)])
    results = [add(**call.args) for call in answer.outputs.tool_calls]
    return {"calls": calls, "text": str(results)}


def structured():
    dspy.configure(lm=model(), adapter=dspy.JSONAdapter())

    class Ask(dspy.Signature):
        question: str = dspy.InputField()
        city: City = dspy.OutputField()

    return dspy.Predict(Ask)(question=CITY).city.model_dump()


async def parallel():
    asked = model()
    return [each[0] for each in await asyncio.gather(*[asked.acall(QUESTION) for _ in range(8)])]


async def cancel():
    asked = dspy.LM(NAME, api_base=BASE, api_key=KEY, cache=False, max_tokens=20_000)
    return await cancelled(asked.acall(ENDLESS))


def lacks():
    return error_of(lambda: model(logit_bias={"5": 3})(QUESTION))


if __name__ == "__main__":
    main()
