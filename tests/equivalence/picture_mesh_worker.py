"""Log-probabilities and gradients of sequences with pictures on meshes of 8 simulated devices.

    picture_mesh_worker.py RESULT.npz qwen3_vl all,frozen 1,1,1 1,2,2,2

Writes those of each model and mesh; devices are by dp, fsdp, tp and cp. The model `small` is a Qwen3-VL of
one layer and one block, with a level of features after it.
"""

import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from picture_tables import SMALL, picture_table, store_of, whole_params, without_tower
from towers import seeing

from quatrain.config.mesh import MeshShape
from quatrain.config.schema import UpdateConfig
from quatrain.forward.micro_batch import micro_batches
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import PolicySpec
from quatrain.models.architecture import Architecture
from quatrain.models.params import VISION
from quatrain.parallel.mesh import make_mesh, to_host
from quatrain.update.gradient import sum_gradients
from quatrain.update.objective import PolicyObjective

OBJECTIVE = PolicyObjective.of(UpdateConfig(entropy_coef=0.2), on_policy=True)


def small(trained: str) -> Architecture:
    arch = seeing("qwen3_vl", trained)
    return replace(arch, layers=arch.layers[:1], vision=replace(arch.vision, depth=1, deepstack=(0,)))


def results(model_type: str, trained: str, shape: MeshShape) -> dict[str, np.ndarray]:
    mesh = make_mesh(shape, jax.devices()[: shape.num_devices])
    arch = small(trained) if model_type == "small" else seeing(model_type, trained)
    whole = whole_params(arch, mesh)
    store, params, table = store_of(arch, whole, mesh=mesh), without_tower(whole, arch), picture_table(arch)
    model = PolicySpec(arch, mesh=mesh)
    # SmolVLM cuts pictures into tiles: its sequences are longer.
    width = {"small": 300, "smolvlm": 128}.get(model_type, 96)
    planner = MicroBatchPlanner(max_tokens=width, num_shards=shape.num_data_shards, share_prompts=True)
    planner = replace(planner, store=store)
    batches = [batch for _, batch in micro_batches(table, planner, mesh, model.forms)]
    found, seen = {}, [each for each in table.pictures.used if each.size == SMALL]
    if model_type != "small":
        found, seen = (
            {"logprobs": predict_tokens(params, table, model=model, planner=planner)},
            table.pictures.used,
        )
    grads, _, _ = sum_gradients(params, batches, model=model, objective=OBJECTIVE)
    for path, leaf in jax.tree_util.tree_flatten_with_path(grads)[0]:
        found[f"gradient{jax.tree_util.keystr(path)}"] = to_host(leaf).sum(axis=0)
    for number, features in enumerate(store.of(seen)):
        found[f"features {number}"] = features
    held = whole[VISION]["blocks"][0]["qkv"].addressable_shards[0].data.size
    found["held"] = np.float64(held / whole[VISION]["blocks"][0]["qkv"].size)
    return found


if __name__ == "__main__":
    every = {}
    for trained in sys.argv[3].split(","):
        for text in sys.argv[4:]:
            found = results(sys.argv[2], trained, MeshShape(*map(int, text.split(","))))
            every |= {f"{trained} {text} {name}": value for name, value in found.items()}
    np.savez(sys.argv[1], **every)
