"""inspect-ai: a model, and an evaluation."""

import asyncio
import json
import tempfile
from contextlib import contextmanager

from checks import BASE, CITY, CITY_SCHEMA, ENDLESS, KEY, MODEL, QUESTION, cancelled, error_of, main
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool
from inspect_ai.util import JSONSchema


@tool
def add():
    async def execute(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    return execute


def model(**config):
    settings = GenerateConfig(max_retries=0, **config)
    return get_model(
        f"openai-api/quatrain/{MODEL}", base_url=BASE, api_key=KEY, config=settings, memoize=False
    )


async def chat():
    return (await model().generate(QUESTION)).completion


@contextmanager
def evaluated(solver, asked):
    """The samples of an evaluation, which are read from its log when they are looked at."""
    dataset = [Sample(input=QUESTION, target="5") for _ in range(4)]
    with tempfile.TemporaryDirectory() as logs:
        task = Task(dataset=dataset, solver=solver, scorer=includes())
        [log] = eval(task, model=asked, display="none", log_dir=logs)
        assert log.status == "success", log.error
        yield log.samples


def tools():
    with evaluated([use_tools(add()), generate(tool_calls="loop")], model()) as samples:
        messages = [message for sample in samples for message in sample.messages]
        calls = [call.arguments for each in messages for call in getattr(each, "tool_calls", None) or []]
        return {"calls": calls, "text": samples[0].output.completion}


async def structured():
    schema = ResponseSchema(name="city", json_schema=JSONSchema(**CITY_SCHEMA), strict=True)
    return json.loads((await model(response_schema=schema).generate(CITY)).completion)


async def parallel():
    asked = model()
    return [each.completion for each in await asyncio.gather(*[asked.generate(QUESTION) for _ in range(8)])]


async def cancel():
    return await cancelled(model().generate(ENDLESS))


def scores():
    """The share of an evaluation's answers that have the target."""
    with evaluated([generate()], model(seed=1)) as samples:
        return [sample.scores["includes"].value for sample in samples]


def lacks():
    return error_of(lambda: model(logit_bias={5: 3}).generate(QUESTION))


async def responses_chat():
    asked = get_model(f"openai/{MODEL}", base_url=BASE, api_key=KEY, responses_api=True, memoize=False)
    return (await asked.generate(QUESTION)).completion


if __name__ == "__main__":
    main()
