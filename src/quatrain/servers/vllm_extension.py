"""What a vLLM server gets by `--worker-extension-cls quatrain.servers.vllm_extension.Reload`.

Imported in vLLM's own workers, where quatrain need not be installed, only found (PYTHONPATH). Called through
vLLM's /collective_rpc by `kinds.Vllm`.
"""

from __future__ import annotations

from typing import Any


class Reload:
    """Methods that vLLM adds to its worker class."""

    reload_weights: Any
    model_runner: Any

    def quatrain_extension(self) -> str:
        """Says that the server was started with this class."""
        return "Reload"

    def load_quatrain_weights(self, path: str) -> None:
        """Loads the safetensors in the folder `path` in place of the model's weights.

        A CPU computes with packed copies, of which vLLM's own reload misses two: that of an output head that
        is tied to the embeddings, and those of experts, which are packed with their first kernel only.
        """
        model = self.model_runner.get_model()
        for layer in model.modules():
            experts = getattr(layer, "w13_weight", None)
            if experts is not None and experts.device.type == "cpu":
                layer.quant_method.moe_kernel = None
        self.reload_weights(weights_path=path)
        # Of a model that reads pictures too, the text model is a part.
        text = getattr(model, "language_model", model)
        head = getattr(text, "lm_head", None)
        embeddings = getattr(getattr(text, "model", None), "embed_tokens", None)
        tied = getattr(model.config, "tie_word_embeddings", False)
        if tied and head is not None and embeddings is not None and head is not embeddings:
            head.weight = embeddings.weight
            head.quant_method.process_weights_after_loading(head)
