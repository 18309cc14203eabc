"""The model of the programs beside this file, which tests start as processes of their own."""

from quatrain.models.architecture import Architecture
from quatrain.models.families import architecture_from_hf


def tiny_qwen2(num_layers: int) -> Architecture:
    """A Qwen 2 with 4 heads and 2 key/value heads of size 8, and 64 words."""
    return architecture_from_hf(
        {
            "model_type": "qwen2",
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        }
    )
