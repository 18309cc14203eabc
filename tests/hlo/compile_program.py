"""Compiles one of quatrain's programs for a device that is not here, and prints what it counts as JSON.

    make test-hlo                                                   # installs the compilers, runs the tests
    .venv/bin/python tests/hlo/compile_program.py h100 decode 0.5B --text decode.hlo

The shapes are those of Qwen2.5, with few layers; matrices of the sampler and products are in bfloat16, and
parameters of the update in float32. Decode: 256 slots in groups of 8, prompts of 256 tokens, 512 positions of
own tokens. Prefill: 8 prompts. Update: a micro-batch of 16,384 tokens with shared prompts, recomputed layer
by layer. Head: 12,288 scored tokens. Sampling: 256 rows.

`experts` is a Qwen3-MoE of 32 experts of 512 columns, 4 of them for a token, and hidden size 1024; its
vocabulary has 32,768 words, so that the head does not hide the layers. `--mesh 1,1,1,1,2` splits its experts
over two devices of `ep`, each of which has a micro-batch of its own; `--mesh 1,1,2` over `tp`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from devices import TARGETS, Target
from read_hlo import MIB, describe

LARGE_MIB = 64
SLOTS, GROUP, PROMPT, OWN = 256, 8, 256, 512
"""Sequences, sequences of a prompt, positions of a prompt, positions of a sequence's own tokens."""
UPDATE_TOKENS, SCORED_TOKENS = 16_384, 12_288
SIZES = {"0.5B": (896, 4864, 14), "1.5B": (1536, 8960, 12)}
"""Hidden size, width of the MLP, and query heads of Qwen2.5."""
EXPERTS = {
    "model_type": "qwen3_moe",
    "vocab_size": 32768,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "intermediate_size": 4096,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
}


def compiled(
    target: str,
    program: str,
    size: str,
    layers: int = 2,
    attention: str | None = None,
    mesh: str = "1,1,1",
    experts: str | None = None,
) -> dict[str, Any]:
    """The counts of a program, compiled in a process of its own."""
    command = [sys.executable, __file__, target, program, size, "--layers", str(layers), "--mesh", mesh]
    ran = subprocess.run(
        [
            *command,
            *(["--attention", attention] if attention else []),
            *(["--experts", experts] if experts else []),
        ],
        env=TARGETS[target].child_environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    if ran.returncode:
        raise RuntimeError(f"{' '.join(command[2:])} does not compile:\n{ran.stderr[-4000:]}")
    counts: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return counts


class Programs:
    """The programs, lowered with abstract arrays for devices of a kind."""

    def __init__(self, target: Target, size: str, layers: int, attention: str, mesh: str = "1,1,1") -> None:
        import jax.numpy as jnp

        from quatrain.backend import backend_of
        from quatrain.config.mesh import MeshShape
        from quatrain.models.families import architecture_from_hf
        from quatrain.parallel.mesh import make_mesh

        hidden, mlp, heads = SIZES.get(size, (0, 0, 1))
        self.arch = architecture_from_hf(
            {
                "model_type": "qwen2",
                "vocab_size": 151936,
                "hidden_size": hidden,
                "intermediate_size": mlp,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": 2,
                "head_dim": hidden // heads,
                "max_position_embeddings": 32768,
                "rope_theta": 1e6,
                "tie_word_embeddings": True,
                **(EXPERTS if size == "experts" else {}),
            }
        )
        self.backend = backend_of(target.kind)
        self.attention = attention
        shape = MeshShape(*map(int, mesh.split(",")))
        self.mesh = make_mesh(shape, target.devices(shape.num_devices))
        self.shards = shape.num_data_shards
        self.dtype = jnp.dtype("bfloat16")

    def _like(self, tree: Any) -> Any:
        """Abstract arrays of the shapes and dtypes in `tree`, on the device."""
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        place = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)

    @staticmethod
    def _placed(x: Any, place: Any) -> Any:
        import jax

        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    def _of_shards(self, tree: Any) -> Any:
        """Abstract arrays of data shards, each of which has one like those in `tree`."""
        import jax

        from quatrain.parallel.mesh import data_sharding

        def of_shards(x: Any) -> Any:
            shape = (self.shards * x.shape[0], *x.shape[1:])
            return self._placed(jax.ShapeDtypeStruct(shape, x.dtype), data_sharding(self.mesh))

        return jax.tree.map(of_shards, tree)

    def _array(self, dtype: Any, *shape: int) -> Any:
        import jax

        return self._like(jax.ShapeDtypeStruct(shape, dtype))

    def _params(self, dtype: Any) -> Any:
        from quatrain.models.params import abstract_params

        return abstract_params(self.arch, dtype, self.mesh)

    def _cache(self, slots: int, positions: int) -> Any:
        from quatrain.models.kv_cache import CachePart

        mixer, layers = self.arch.layers[0].mixer, self.arch.num_layers
        heads, size = mixer.num_kv_heads, mixer.head_dim
        keys, values = (
            (self._array(self.dtype, slots, heads, *shape),) * layers
            for shape in ((size, positions), (positions, size))
        )
        return CachePart(tuple(zip(keys, values, strict=True)))

    def _sampler(self) -> Any:
        from quatrain.engine.decode import Program

        return Program(self.arch, (1,), self.dtype, self.attention, self.mesh, self.backend)

    def decode(self) -> Any:
        """A call of the sampler: several tokens of every slot."""
        import jax.numpy as jnp

        from quatrain.engine.decode import Slots, decode_program
        from quatrain.models.decode_step import Sharing
        from quatrain.ops.sampling import SamplingNumbers

        prompts = SLOTS // GROUP
        integers, flags = self._array(jnp.int32, SLOTS), self._array(jnp.bool_, SLOTS)
        unsigned = self._array(jnp.uint32, SLOTS)
        members, lengths = self._array(jnp.int32, prompts, GROUP), self._array(jnp.int32, prompts)
        sampling = self._like(SamplingNumbers.alike(SLOTS))
        return decode_program(self.backend).lower(
            self._params(self.dtype),
            self._cache(SLOTS, OWN),
            self._cache(prompts, PROMPT),
            Slots(*(integers,) * 4, *(unsigned,) * 3, flags, sampling),
            Sharing(members, integers, lengths),
            self._array(jnp.int32),
            program=self._sampler(),
        )

    def prefill(self) -> Any:
        """The prompts of eight groups, packed into one row."""
        import jax
        import numpy as np

        from quatrain.engine.decode import prefill_program
        from quatrain.engine.groups import Admitted, Group, UsualSampling, pack_prompts
        from quatrain.models.attention import unpacks_above
        from quatrain.models.prefix_tree import RowForms
        from quatrain.types.batches import Prompt

        ids = np.arange(8 * PROMPT, dtype=np.int32).reshape(8, PROMPT)
        pack = [
            Admitted(Group.of(Prompt(i, row, ""), 0, range(GROUP), OWN), i, i) for i, row in enumerate(ids)
        ]
        prefix_slots = SLOTS // GROUP
        packed = self._like(
            pack_prompts(
                [pack], GROUP, prefix_slots, RowForms(unpacks_above(self.attention)), UsualSampling()
            )
        )
        assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(packed))
        return prefill_program(self.backend).lower(
            self._params(self.dtype),
            self._cache(prefix_slots, PROMPT),
            packed,
            program=self._sampler(),
        )

    def gradient(self) -> Any:
        """The gradient of one micro-batch, added to the sum."""
        import jax
        import jax.numpy as jnp

        from quatrain.config.schema import UpdateConfig
        from quatrain.parallel.mesh import shardings
        from quatrain.update.gradient import _copies, _zero_total, gradient_program
        from quatrain.update.objective import PolicyObjective

        model = self._policy()
        objective = PolicyObjective.of(UpdateConfig(), on_policy=True)
        params, batch = self._params(jnp.float32), self._of_shards(self._micro_batch(model))
        grads, stats = jax.eval_shape(partial(_zero_total, model=model, objective=objective), params, batch)
        places = shardings(self.mesh, _copies(model))
        total = jax.tree.map(self._placed, grads, places), self._like(stats)
        return gradient_program(self.backend).lower(params, total, batch, model=model, objective=objective)

    def _policy(self) -> Any:
        from quatrain.forward.specs import PolicySpec

        return PolicySpec(
            self.arch,
            dtype=self.dtype.name,
            remat="layer",
            attention=self.attention,
            mesh=self.mesh,
            backend=self.backend,
        )

    def _micro_batch(self, model: Any) -> Any:
        """A micro-batch on the CPU: groups whose prompts are shared, completions of up to 1,024 tokens."""
        import numpy as np

        from quatrain.config.schema import LogprobConfig
        from quatrain.forward.micro_batch import fill
        from quatrain.forward.table import TokenTable
        from quatrain.parallel.mesh import one_device

        rng, groups = np.random.default_rng(0), 8
        ids = np.repeat(np.arange(groups), GROUP)
        lengths = PROMPT + np.clip(rng.lognormal(np.log(200), 0.6, len(ids)), 1, 1024).astype(int)
        lengths[0] = PROMPT + 1024
        columns = np.arange(lengths.max())
        attention = columns < lengths[:, None]
        completion = attention & (columns >= PROMPT)
        tokens = np.where(completion, 3, ids[:, None]).astype(np.int32)
        sampled = {"advantages": np.ones(attention.shape, np.float32) * completion}
        sampled["rollout_logprobs"] = -sampled["advantages"]
        table = TokenTable(tokens, attention, completion, sampled, ids).weighted("token_mean", 1024)
        sizes = LogprobConfig(max_tokens_per_device=UPDATE_TOKENS)
        model = replace(model, mesh=one_device())
        cut = model.planner(sizes, share_prompts=True).plans(table)[0]
        whole = replace(cut, width=UPDATE_TOKENS // len(cut.buffers))
        return fill(whole, table, one_device(), model.forms)

    def head(self) -> Any:
        """Log-probabilities and entropies of scored tokens, and their gradients by head and hidden states."""
        import jax
        import jax.numpy as jnp

        from quatrain.forward.specs import head_logprobs

        def loss(head: Any, hidden: Any, targets: Any, num_live: Any) -> Any:
            params = {"embed": head}
            logprobs, entropy = head_logprobs(params, self._policy(), hidden, targets, num_live)
            return logprobs.sum() + 1e-3 * entropy.sum()

        arguments = (
            self._params(jnp.float32)["embed"],
            self._array(self.dtype, SCORED_TOKENS, self.arch.hidden_size),
            self._array(jnp.int32, SCORED_TOKENS),
            self._array(jnp.int32),
        )
        return jax.jit(jax.grad(loss, (0, 1))).lower(*arguments)

    def sampling(self) -> Any:
        """Logits of the tokens of all slots, and a token drawn from each."""
        import jax
        import jax.numpy as jnp

        from quatrain.models.decoder import logits
        from quatrain.ops.sampling import SamplingNumbers

        program = self._sampler()

        def draw(params: Any, hidden: Any, sampling: Any, slots: Any) -> Any:
            return program.draw(
                logits(params, self.arch, hidden, backend=self.backend), sampling, slots, slots, slots
            )

        unsigned = self._array(jnp.uint32, SLOTS)
        sampling = SamplingNumbers(unsigned, self._array(jnp.float32, SLOTS), None)
        hidden = self._array(self.dtype, SLOTS, self.arch.hidden_size)
        params = {"embed": self._params(self.dtype)["embed"]}
        return jax.jit(draw).lower(params, hidden, sampling, unsigned)


PROGRAMS: dict[str, Callable[[Programs], Any]] = {
    name: getattr(Programs, name) for name in ("decode", "prefill", "gradient", "head", "sampling")
}


def main() -> None:
    """Compiles the program that the arguments name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("program", choices=sorted(PROGRAMS))
    parser.add_argument("size", choices=sorted([*SIZES, "experts"]))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--attention", help="implementation, in place of the target's own")
    parser.add_argument("--mesh", default="1,1,1", help="the mesh of the gradient")
    parser.add_argument("--experts", help="product of experts, in place of the target's own")
    parser.add_argument("--text", type=Path, help="where the compiled program's text goes")
    arguments = parser.parse_args()
    target = TARGETS[arguments.target]
    if reason := target.missing:
        parser.error(reason)
    if any(os.environ.get(name) != value for name, value in target.environment.items()):
        environment = target.child_environment()
        raise SystemExit(subprocess.run([sys.executable, *sys.argv], env=environment).returncode)
    began = time.perf_counter()
    attention = arguments.attention or target.attention
    if attention == "tokamax":
        _pretend_devices(target)
    programs = Programs(target, arguments.size, arguments.layers, attention, arguments.mesh)
    programs.backend = replace(programs.backend, experts=arguments.experts or programs.backend.experts)
    program = PROGRAMS[arguments.program](programs).compile()
    text, memory = program.as_text(), program.memory_analysis()
    if arguments.text:
        arguments.text.write_text(text)
    counts = {
        "temporary_mib": round(memory.temp_size_in_bytes / MIB),
        **describe(text, limit_mib=LARGE_MIB),
        "optimal_ms": _milliseconds(program.cost_analysis()),
        "seconds": round(time.perf_counter() - began, 1),
    }
    print(json.dumps(counts))


def _pretend_devices(target: Target) -> None:
    """tokamax asks which device this process has; it gets the one that is compiled for."""
    from jax.extend import backend

    device = target.devices()[0]
    backend.get_default_device = lambda: device


def _milliseconds(costs: Any) -> float | None:
    """XLA's own estimate for TPUs, which counts a round of each loop once; None where it has none."""
    costs = costs[0] if isinstance(costs, list) else costs
    seconds = (costs or {}).get("optimal_seconds", 0.0)
    return round(1e3 * seconds, 3) if seconds > 0 else None


if __name__ == "__main__":
    main()
