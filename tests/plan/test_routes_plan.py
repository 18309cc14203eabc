"""The plan counts the routes of a step's batches, in the memory of the host."""

from test_placement import SMALL, final

from quatrain.plan.device_memory import render
from quatrain.plan.placement import placement

__all__ = ["final"]  # the fixture

MOE = {
    **SMALL,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "mlp_only_layers": [0],
}
SIZES = ("data.batch_size=6", "rollout.n=5", "data.max_prompt_length=100", "rollout.max_new_tokens=28")


def _routes(config) -> int | None:
    return placement(config).to_dict()["bytes_on_host"].get("routes")


def test_routes_of_a_step_are_counted(final):
    config = final(MOE, *SIZES)
    assert _routes(config) == 6 * 5 * 128 * 3 * 2
    text = render(placement(config))
    assert "bytes on the host of each process\nroutes  22.50 KiB" in text
    assert "30 sequences x 128 tokens x 6 B" in " ".join(text.split())


def test_more_than_256_experts_take_two_bytes_and_batches_ahead_count_each(final):
    assert _routes(final({**MOE, "num_experts": 300}, *SIZES)) == 6 * 5 * 128 * 3 * 2 * 2
    assert _routes(final(MOE, *SIZES, "rollout.max_staleness=2")) == 3 * 6 * 5 * 128 * 3 * 2


def test_nothing_is_counted_that_is_not_recorded(final):
    assert _routes(final(MOE, *SIZES, "rollout.record_routes=false")) is None
    dense = placement(final(SMALL, *SIZES))
    assert dense.host == ()
    assert "bytes on the host" not in render(dense)
