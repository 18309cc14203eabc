"""Features, logits and gradients of small models that see, by torch: tests/golden/tower_*.npz.

Run by `make oracles`, which needs torch; the tests that read the files do not. Torch computes in float64.
Here the whole gradients of torch and quatrain are compared, tensor by tensor; the files keep two numbers of
each.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))
from goldens import GOLDEN, draw, probes, weights_crc
from towers import (
    CASES,
    CONFIGS,
    PLACEHOLDER,
    SIZES,
    feature_gradients,
    logit_gradients,
    loss_weights,
    picture,
    read_seeing,
    seeing,
    token_ids,
)

from quatrain.models.vision import Vision

LARGEST = 1e-4
"""Of a tensor's differences, as a share of the norm of its gradient."""


class _InDouble:
    """Torch for a module that computes parts in float32: here all is float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def main() -> None:
    """Of the model types in the arguments, or of all."""
    logging.set_verbosity_error()
    modeling_qwen3_5.torch = _InDouble()
    for case in sys.argv[1:] or CASES:
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**CONFIGS[case])).eval()
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            config = json.loads((Path(folder) / "config.json").read_text())
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.padding_idx = None
        model = model.double()
        tensors = dict(model.named_parameters())
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(torch.from_numpy(draw(name, tuple(tensor.shape))))
        weights = {name: draw(name, tuple(tensor.shape)) for name, tensor in tensors.items()}
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        vision = seeing(case).vision
        assert vision is not None
        found = arrays_of(case, model, vision)
        about = {"config": config, "shapes": shapes, "weights_crc": weights_crc(weights)}
        kept = {"about": json.dumps(about), **found}
        path = GOLDEN / f"tower_{case}.npz"
        gradients = {name: gradients_of(case, model, vision, name) for name in ("features", "logits")}
        np.savez_compressed(path, **kept, of_features=np.zeros(0), of_logits=np.zeros(0))
        golden = read_seeing(case)
        ours = {"features": feature_gradients(golden), "logits": logit_gradients(golden)}
        numbers = {f"of_{name}": compared(f"{case}, {name}", gradients[name], ours[name]) for name in ours}
        np.savez_compressed(path, **kept, **numbers)
        print(case, path.stat().st_size, "bytes")


def compared(case: str, theirs: dict[str, np.ndarray], ours: dict[str, np.ndarray]) -> np.ndarray:
    """What is kept of the gradients by torch; raises AssertionError where ours differ too much."""
    assert theirs.keys() == ours.keys(), theirs.keys() ^ ours.keys()
    whole = np.sqrt(sum(np.square(g).sum() for g in theirs.values()))
    # Biases of keys without rotary embeddings change nothing: their gradients are rounding.
    norms = {name: np.linalg.norm(g) for name, g in theirs.items()}
    norms = {name: norm if norm > 1e-9 * whole else whole for name, norm in norms.items()}
    off = {name: np.abs(ours[name] - g).max() / norms[name] for name, g in theirs.items()}
    worst = max(off, key=lambda name: off[name])
    assert off[worst] < LARGEST, f"{case}: the gradients of {worst} differ by {off[worst]}"
    print(f"{case}: {len(off)} gradients, the largest difference {off[worst]:.1e} of the norm ({worst})")
    return probes(theirs)


def inputs_of(case: str, model: Any, vision: Vision) -> dict[str, torch.Tensor]:
    """The arguments of the model, with rotary positions given: it keeps those of an earlier call."""
    drawn = [picture(vision, number, size) for number, size in enumerate(SIZES)]
    ids = torch.from_numpy(token_ids(vision))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if not vision.has_grid:
        tiles = np.concatenate([images for images, _ in drawn])
        return inputs | {"pixel_values": torch.from_numpy(tiles)[None].double()}
    processor, p, m = Qwen2VLImageProcessorPil(), vision.patch, vision.merge
    for images, patches in drawn:
        theirs, _, _ = processor.patchify(images[0], p, m, vision.temporal)
        assert (theirs == patches).all(), "the order of patches is not that of the processor"
    grids = torch.tensor([[1, *vision.grids(size)[0]] for size in SIZES])
    kinds = (ids == PLACEHOLDER).int()
    positions, _ = model.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grids)
    return inputs | {
        "pixel_values": torch.from_numpy(np.concatenate([patches for _, patches in drawn])).double(),
        "image_grid_thw": grids,
        "mm_token_type_ids": kinds,
        "position_ids": positions,
    }


def features_of(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """[1 + L, F, D] of all pictures."""
    given = {name: inputs[name] for name in ("pixel_values", "image_grid_thw") if name in inputs}
    found = model.model.get_image_features(**given, return_dict=True)
    levels = [found.pooler_output, *(getattr(found, "deepstack_features", None) or [])]
    return torch.stack([torch.cat(list(level)) for level in levels])


@torch.no_grad()
def arrays_of(case: str, model: Any, vision: Vision) -> dict[str, np.ndarray]:
    """What the file keeps of the forward pass."""
    inputs = inputs_of(case, model, vision)
    positions = inputs.get("position_ids", torch.arange(inputs["input_ids"].shape[1])[None])
    logits = model(**inputs, use_cache=False).logits
    return {
        "position_ids": positions.numpy().astype(np.int32),
        "features": features_of(model, inputs).numpy().astype(np.float32),
        "logits": logits.numpy().astype(np.float32),
    }


def gradients_of(case: str, model: Any, vision: Vision, loss: str) -> dict[str, np.ndarray]:
    """The gradient of each tensor that the loss depends on."""
    inputs = inputs_of(case, model, vision)
    model.zero_grad(set_to_none=True)
    if loss == "features":
        found = features_of(model, inputs)
        (found * torch.from_numpy(loss_weights(tuple(found.shape)))).sum().backward()
    else:
        logits = model(**inputs, use_cache=False).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits, inputs["input_ids"][0, 1:]).backward()
    return {
        name: tensor.grad.float().numpy()
        for name, tensor in model.named_parameters()
        if tensor.grad is not None
    }


if __name__ == "__main__":
    main()
