"""Trains a quickstart model with the cookbook's `rl.train`, under a renderer and a data set of its own.

python quickstart.py train.jsonl heldout.jsonl STEPS LEARNING_RATE      rows: prompt (messages), answer

Writes log/metrics.jsonl, whose `test/accuracy` is the share of greedy answers, right and in the format.
"""

import asyncio
import json
import re
import sys
from functools import partial
from pathlib import Path

import chz
from client import MODEL
from tinker import types
from tinker_cookbook import renderers
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.renderers.base import RenderedMessage, Renderer
from tinker_cookbook.rl import train
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

NAME = "quatrain/quickstart"
PROMPTS, SAMPLES, MAX_TOKENS = 32, 8, 16
FORMAT = re.compile(r"<think>.*</think>\n<answer>(\d+)</answer>")


class Words(Renderer):
    """`<|user|>text<|assistant|>answer<|end|>`, as the model's chat template writes it."""

    def get_stop_sequences(self):
        return [self.tokenizer.eos_token_id]

    def ids(self, text):
        return types.EncodedTextChunk(tokens=self.tokenizer.encode(text, add_special_tokens=False))

    def render_message(self, message, ctx):
        end = self.tokenizer.eos_token if message["role"] == "assistant" else ""
        header = self.ids(f"<|{message['role']}|>")
        return RenderedMessage(header=header, output=[self.ids(message["content"] + end)])

    def parse_response(self, response):
        ended = response[-1:] == [self.tokenizer.eos_token_id]
        text = self.tokenizer.decode(response[:-1] if ended else response)
        how = renderers.ParseTermination.STOP_SEQUENCE if ended else renderers.ParseTermination.MALFORMED
        return renderers.Message(role="assistant", content=text), how


renderers.register_renderer(NAME, lambda tokenizer, image_processor=None: Words(tokenizer))


def rows_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def is_right(text, answer):
    found = FORMAT.fullmatch(text)
    return found is not None and found[1] == answer


class WordProblem(ProblemEnv):
    def __init__(self, row, renderer):
        super().__init__(renderer, format_coef=0.2)
        self.row = row

    def get_question(self):
        return self.row["prompt"][0]["content"]

    def get_reference_answer(self):
        return self.row["answer"]

    def check_answer(self, sample_str):
        return is_right(sample_str, self.row["answer"])

    def check_format(self, sample_str):
        return FORMAT.fullmatch(sample_str) is not None


class WordProblems(RLDataset):
    def __init__(self, rows, renderer):
        self.rows, self.renderer = rows, renderer

    def get_batch(self, index):
        rows = self.rows[index * PROMPTS : (index + 1) * PROMPTS]
        return [ProblemGroupBuilder(partial(WordProblem, row, self.renderer), SAMPLES) for row in rows]

    def __len__(self):
        return len(self.rows) // PROMPTS


@chz.chz
class Builder(RLDatasetBuilder):
    path: str

    async def __call__(self):
        renderer = renderers.get_renderer(NAME, get_tokenizer(MODEL))
        return WordProblems(rows_of(self.path), renderer), None


class Greedy(SamplingClientEvaluator):
    """Accuracy of the likeliest answers to all held-out rows."""

    def __init__(self, path):
        self.rows, self.renderer = rows_of(path), renderers.get_renderer(NAME, get_tokenizer(MODEL))

    async def __call__(self, sampling_client):
        asked = types.SamplingParams(
            max_tokens=MAX_TOKENS, temperature=0.0, stop=self.renderer.get_stop_sequences()
        )
        prompts = [self.renderer.build_generation_prompt(row["prompt"]) for row in self.rows]
        drawn = [sampling_client.sample(prompt, 1, asked) for prompt in prompts]
        texts = [
            self.renderer.parse_response((await each).sequences[0].tokens)[0]["content"] for each in drawn
        ]
        right = [is_right(text, row["answer"]) for text, row in zip(texts, self.rows, strict=True)]
        return {"test/accuracy": sum(right) / len(right)}


if __name__ == "__main__":
    data, held_out, steps, learning_rate = sys.argv[1:]
    config = train.Config(
        model_name=MODEL,
        recipe_name="quickstart",
        renderer_name=NAME,
        dataset_builder=Builder(path=data),
        evaluator_builders=[partial(Greedy, held_out)],
        learning_rate=float(learning_rate),
        lora_rank=32,
        max_tokens=MAX_TOKENS,
        max_steps=int(steps),
        num_epochs=10,
        eval_every=10,
        save_every=0,
        log_path="log",
    )
    asyncio.run(train.main(config))
