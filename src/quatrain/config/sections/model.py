"""The section `model`: source of the policy's weights, dtypes and kernels."""

from __future__ import annotations

from typing import Literal

from quatrain.config.fields import NOT_SET, Derived, Section, Text


class ModelConfig(Section):
    """The policy: source of its weights, dtypes and kernels."""

    path: Text = "builtin:tiny"
    """The model: `builtin:tiny`, a local Hugging Face folder, a model on the Hub
    (`Qwen/Qwen2.5-0.5B-Instruct`) or a `.gguf` file."""
    tokenizer: Derived[Text] = NOT_SET
    """The tokenizer: a folder, a model on the Hub or a `.gguf` file; derived: `model.path`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations, matrix products and the KV cache."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which parameters are stored and exported."""
    remat: Literal["none", "dots", "layer"] = "layer"
    """What the backward pass recomputes: `layer`: everything in a layer (only the layer's input is kept);
    `dots`: everything but products with weights and attention (more memory, less time); `none`: nothing."""
    attention: Literal["auto", "xla", "cudnn", "tokamax", "splash"] = "auto"
    """Attention kernel of forward and backward passes: `xla` (any device), `cudnn` (cuDNN flash attention,
    GPUs), `tokamax` (Mosaic kernels of the extra `gpu`, GPUs) or `splash` (splash attention, TPUs). `auto`
    takes the first kernel of the device that supports the model and computes a small example as `xla` does,
    and logs the choice. A named kernel that does not is an error."""
    experts: Literal["auto", "blocks", "ragged", "tokamax"] = "auto"
    """How products with experts' matrices are computed: `blocks` (a loop over blocks of rows of one expert,
    any device), `ragged` (XLA's `ragged_dot`, a kernel on TPUs, large and slow elsewhere) or `tokamax` (the
    kernel of the extra `gpu`, GPUs and TPUs). `auto` takes the first of the device that computes a small
    example as `blocks` does, and logs the choice. A named one that does not is an error."""
