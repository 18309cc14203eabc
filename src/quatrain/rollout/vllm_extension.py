"""What a vLLM server gets by `--worker-extension-cls quatrain.rollout.vllm_extension.Reload`.

Imported in vLLM's own workers, where quatrain need not be installed, only found (PYTHONPATH). Called through
vLLM's /collective_rpc by `server_kinds.Vllm`.
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

        vLLM's own reload passes over an output head that is tied to the embeddings, of which a CPU computes
        with a packed copy: without more, the head keeps the weights that the server was started with.
        """
        self.reload_weights(weights_path=path)
        model = self.model_runner.get_model()
        head = getattr(model, "lm_head", None)
        embeddings = getattr(getattr(model, "model", None), "embed_tokens", None)
        tied = getattr(model.config, "tie_word_embeddings", False)
        if tied and head is not None and embeddings is not None and head is not embeddings:
            head.weight = embeddings.weight
            head.quant_method.process_weights_after_loading(head)
