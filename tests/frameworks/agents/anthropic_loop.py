"""A loop of tools on the package anthropic, as its pages show it."""

import anthropic

TOOL = {
    "name": "add",
    "description": "Adds two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


async def agent(client, row):
    asking = anthropic.AsyncAnthropic(base_url=client.base_url.removesuffix("/v1"), api_key=client.api_key)
    messages = [{"role": "user", "content": row["prompt"][-1]["content"]}]
    system = [{"type": "text", "text": "Use the tool.", "cache_control": {"type": "ephemeral"}}]
    while True:
        async with asking.messages.stream(
            model=client.model, max_tokens=64, system=system, messages=messages, tools=[TOOL]
        ) as events:
            answer = await events.get_final_message()
        messages.append({"role": "assistant", "content": answer.content})
        if answer.stop_reason != "tool_use":
            return float(any("5" in block.text for block in answer.content))
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": str(block.input["a"] + block.input["b"]),
            }
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
