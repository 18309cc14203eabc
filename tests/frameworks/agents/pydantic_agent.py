"""An agent of pydantic-ai, whose model must call a tool: its answer is one, too."""

from pydantic import BaseModel
from pydantic_ai import Agent, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Sum(BaseModel):
    """The answer."""

    value: int


async def agent(client, row):
    provider = OpenAIProvider(base_url=client.base_url, api_key=client.api_key)
    asked = Agent(OpenAIChatModel(client.model, provider=provider), output_type=Sum)

    @asked.tool_plain
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    run = await asked.run(row["prompt"][-1]["content"], usage_limits=UsageLimits(request_limit=30))
    return float(run.output.value == 5)
