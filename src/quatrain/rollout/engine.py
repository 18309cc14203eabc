"""Line 1 of the stanza: prompts in, completions with the sampler's own log-probabilities out.

Data flow: `Prompt` list -> `RolloutEngine.generate` -> `RolloutBatch`. Each prompt is prefilled once,
whatever the group size; the randomness of a token depends on (seed, training step, sequence id,
position) alone.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quatrain.config.schema import RolloutConfig
from quatrain.models.families import Architecture
from quatrain.ops.ladder import round_up
from quatrain.parallel.compilations import num_compilations
from quatrain.rollout.decode import DecodeState, Draw, Sampling, decode, start
from quatrain.types import Metric, Prompt, RolloutBatch, describe

# Tokens decoded between two looks at the stop strings.
_STOP_CHECK_TOKENS = 16


@dataclass
class _Decoded:
    """B sequences off the device: tokens and logprobs [B, L], lengths and stop-string hits [B]."""

    tokens: np.ndarray
    logprobs: np.ndarray
    lengths: np.ndarray
    matched: np.ndarray


class RolloutEngine:
    """Samples completions from the weights it was last handed.

    `stop_ids` are the token ids that end a completion; they stay in it and are trained. `seed` is the
    run's.
    """

    def __init__(
        self,
        arch: Architecture,
        config: RolloutConfig,
        tokenizer: Any,
        *,
        stop_ids: Sequence[int],
        seed: int,
        dtype: str = "float32",
    ):
        self.arch = arch
        self.tokenizer = tokenizer
        self.stop_ids = tuple(stop_ids)
        self.dtype = jnp.dtype(dtype)
        self.sampling = Sampling(
            n=config.n,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            stop=config.stop,
        )
        self._seed = jnp.uint32(seed)
        self._params: Any = None
        self._version = -1
        self._sync_s = 0.0

    def sync_weights(self, params: Any, version: int) -> None:
        """Sample from `params` from now on; every token they produce carries `version`."""
        began = time.perf_counter()
        self._params, self._version = params, version
        self._sync_s = time.perf_counter() - began

    def generate(
        self, prompts: Sequence[Prompt], *, step: int = 0, sampling: Sampling | None = None
    ) -> RolloutBatch:
        """`sampling.n` completions of each prompt, the samples of a prompt side by side, prompts in order.

        `step` is the training step that the randomness is derived from. An empty list gives an empty
        batch. Raises AssertionError before `sync_weights`.
        """
        assert self._params is not None, "sync_weights comes before generate"
        spec = sampling or self.sampling
        compilations = num_compilations()
        began = time.perf_counter()
        state, draw = self._start(prompts, spec, step)
        prefilled = time.perf_counter()
        decoded = self._decode(state, draw, len(prompts) * spec.n, step)
        generated = time.perf_counter()
        fields = self._assemble(prompts, spec, decoded)
        flushed = time.perf_counter()
        metrics = _metrics(fields) | {
            "time/rollout_sync_s": Metric(self._sync_s),
            "time/rollout_generate_s": Metric(generated - began),
            "time/rollout_flush_s": Metric(flushed - generated),
            "rollout/prefill_s": Metric(prefilled - began),
            "rollout/decode_s": Metric(generated - prefilled),
            "rollout/tokens_per_s": Metric(float(decoded.lengths.sum()) / (generated - began)),
            "rollout/compilations": Metric(num_compilations() - compilations, reduction="sum"),
        }
        return RolloutBatch(**fields, metrics=metrics)

    def _start(self, prompts: Sequence[Prompt], spec: Sampling, step: int) -> tuple[DecodeState, Draw]:
        rows = round_up(len(prompts), minimum=1)
        width = round_up(max((len(p.input_ids) for p in prompts), default=1))
        input_ids = np.zeros((rows, width), np.int32)
        lengths = np.ones(rows, np.int32)
        sequence_ids = np.zeros((rows, spec.n), np.uint32)
        for row, prompt in enumerate(prompts):
            lengths[row] = len(prompt.input_ids)
            input_ids[row, : lengths[row]] = prompt.input_ids
            sequence_ids[row] = (prompt.group_id * spec.n + np.arange(spec.n)) % 2**32
        draw = Draw(spec, self.stop_ids)
        state = start(
            self._params,
            input_ids,
            lengths,
            np.arange(rows) < len(prompts),
            sequence_ids.reshape(-1),
            self._seed,
            jnp.uint32(step),
            arch=self.arch,
            draw=draw,
            dtype=self.dtype,
        )
        return jax.block_until_ready(state), draw

    def _decode(self, state: DecodeState, draw: Draw, live: int, step: int) -> _Decoded:
        spec = draw.sampling
        matched = np.zeros(state.done.shape, bool)
        lengths = np.asarray(state.lengths).copy()
        stride = _STOP_CHECK_TOKENS if spec.stop else spec.max_new_tokens
        until = 1
        while until < spec.max_new_tokens and not np.asarray(state.done).all():
            until = min(until + stride, spec.max_new_tokens)
            state = decode(
                self._params,
                state,
                jnp.int32(until),
                self._seed,
                jnp.uint32(step),
                arch=self.arch,
                draw=draw,
                dtype=self.dtype,
            )
            lengths = np.where(matched, lengths, np.asarray(state.lengths))
            if spec.stop:
                self._match_stop_strings(np.asarray(state.tokens), lengths, matched, spec.stop)
                state = _finish(state, matched)
        if spec.stop:
            self._match_stop_strings(np.asarray(state.tokens), lengths, matched, spec.stop)
        tokens, logprobs = np.asarray(state.tokens), np.asarray(state.logprobs)
        return _Decoded(tokens[:live], logprobs[:live], lengths[:live], matched[:live])

    def _match_stop_strings(
        self, tokens: np.ndarray, lengths: np.ndarray, matched: np.ndarray, stop: tuple[str, ...]
    ) -> None:
        """Cut each completion after the token that completes a stop string; marks it in `matched`."""
        open_rows = np.flatnonzero(~matched)
        texts = self.tokenizer.batch_decode([tokens[row, : lengths[row]].tolist() for row in open_rows])
        for row, text in zip(open_rows, texts):
            if not any(s in text for s in stop):
                continue
            matched[row] = True
            while lengths[row] > 1:
                shorter = self.tokenizer.decode(tokens[row, : lengths[row] - 1].tolist())
                if not any(s in shorter for s in stop):
                    break
                lengths[row] -= 1

    def _assemble(self, prompts: Sequence[Prompt], spec: Sampling, decoded: _Decoded) -> dict[str, Any]:
        sources = [prompt for prompt in prompts for _ in range(spec.n)]
        prompt_lengths = np.array([len(p.input_ids) for p in sources], np.int64)
        totals = prompt_lengths + decoded.lengths
        shape = (len(sources), int(totals.max(initial=0)))
        columns = np.arange(shape[1])
        attention = columns < totals[:, None]
        completion = attention & (columns >= prompt_lengths[:, None])
        produced = np.arange(decoded.tokens.shape[1]) < decoded.lengths[:, None]
        input_ids = np.zeros(shape, np.int32)
        input_ids[attention & ~completion] = _concatenate([p.input_ids for p in sources], np.int32)
        input_ids[completion] = decoded.tokens[produced]
        logprobs = np.zeros(shape, np.float32)
        logprobs[completion] = decoded.logprobs[produced]
        last = decoded.tokens[np.arange(len(sources)), decoded.lengths - 1]
        stopped = np.isin(last, self.stop_ids) | decoded.matched
        names = sources[0].columns if sources else ()
        return {
            "input_ids": input_ids,
            "attention_mask": attention,
            "completion_mask": completion,
            "rollout_logprobs": logprobs,
            "policy_version": np.where(completion, self._version, -1).astype(np.int32),
            "finish_reason": np.where(stopped, "stop", "length"),
            "group_ids": np.array([p.group_id for p in sources], np.int64),
            "prompts": tuple(p.text for p in sources),
            "completions": tuple(
                self.tokenizer.decode(row[:length].tolist(), skip_special_tokens=True)
                for row, length in zip(decoded.tokens, decoded.lengths)
            ),
            "columns": {name: tuple(p.columns[name] for p in sources) for name in names},
        }


def _finish(state: DecodeState, matched: np.ndarray) -> DecodeState:
    return dataclasses.replace(state, done=state.done | jnp.asarray(matched))


def _concatenate(rows: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(rows).astype(dtype) if rows else np.zeros(0, dtype)


def _metrics(fields: dict[str, Any]) -> dict[str, Metric]:
    completion = fields["completion_mask"].sum(axis=1)
    total = fields["attention_mask"].sum(axis=1)
    truncated = fields["finish_reason"] == "length"
    return {
        **describe("length/prompt", total - completion, ("mean", "max")),
        **describe("length/completion", completion, ("mean", "max")),
        **describe("length/total", total, ("mean", "max")),
        "rollout/truncated_fraction": Metric(float(truncated.sum()), len(truncated)),
    }
