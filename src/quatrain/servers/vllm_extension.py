"""What a vLLM server gets by `--worker-extension-cls quatrain.servers.vllm_extension.Reload`.

Imported in vLLM's own workers, where quatrain need not be installed, only found (PYTHONPATH). Called through
vLLM's /collective_rpc by `kinds.Vllm`.
"""

from __future__ import annotations

import base64
from typing import Any

from quatrain.servers.pieces import Receiver


class Reload:
    """Methods that vLLM adds to its worker class."""

    reload_weights: Any
    model_runner: Any
    local_rank: int
    _quatrain_receiver: Receiver

    def quatrain_extension(self) -> str:
        """Says that the server was started with this class."""
        return "Reload"

    def begin_quatrain_weights(self, files: dict[str, int], piece_bytes: int) -> dict[str, Any] | None:
        """As `Receiver.begin`; None of a worker that loads the files of the first one of its machine."""
        if self.local_rank:
            return None
        if not hasattr(self, "_quatrain_receiver"):
            self._quatrain_receiver = Receiver()
        return self._quatrain_receiver.begin(files, piece_bytes)

    def put_quatrain_weights(self, message: str) -> str | None:
        """As `Receiver.put`, of base64."""
        if self.local_rank:
            return None
        return self._quatrain_receiver.put(base64.b64decode(message))

    def load_quatrain_weights(self, path: str) -> None:
        """Loads the safetensors in the folder `path` in place of the model's weights.

        Raises ValueError if they are sent and have not all come.
        A CPU computes with packed copies, of which vLLM's own reload misses two: that of an output head that
        is tied to the embeddings, and those of experts, which are packed with their first kernel only.
        """
        receiver = getattr(self, "_quatrain_receiver", None)
        if receiver is not None:
            receiver.check_whole(path)
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
