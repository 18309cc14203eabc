"""Whole runs with what saves memory: bfloat16 parameters and moments, and a policy that waits on the host."""

import pytest
from resumed_runs import resumed_copy
from runs import interrupted_after, small_run, steady_metrics

from quatrain.loop.train import train
from quatrain.run.checkpoint import Checkpointer

pytestmark = pytest.mark.usefixtures("narrow_model")

SMALLER = (
    "model.param_dtype=bfloat16", "optimizer.state_dtype=bfloat16", "optimizer.learning_rate=1e-3",
    "update.kl_coef=0.1", "update.reference_sync_steps=2",
)  # fmt: skip
SHORT = ("sft.steps=0", "run.steps=3", "checkpoint.every_steps=1", "checkpoint.keep=3")
ADAPTERS = (
    "lora.rank=4", "optimizer.learning_rate=1e-2", "sft.learning_rate=1e-2", "update.kl_coef=0.1",
    "update.reference_sync_steps=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(small_run(tmp_path_factory.mktemp("runs"), "whole", *SMALLER, *SHORT)).run


@pytest.mark.slow
def test_what_is_saved_has_the_dtypes_of_the_configuration(whole):
    arrays = Checkpointer(whole / "checkpoints")._read_json(3)["arrays"]
    dtypes = {name: proof.partition("[")[0] for name, proof in arrays.items()}
    kinds = {"params": set(), "mu": set(), "nu": set()}
    for name, dtype in dtypes.items():
        for kind, found in kinds.items():
            if kind in name.split("."):
                found.add(dtype)
    assert kinds == {"params": {"bfloat16"}, "mu": {"bfloat16"}, "nu": {"float32"}}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_optimizers_of_matrices_are_resumed_to_the_bit_and_may_wait_on_the_host(name, tmp_path):
    """With parameters in bfloat16, which are rounded stochastically; another optimizer is refused."""
    options = (*SMALLER, *SHORT, f"optimizer.name={name}")
    run = train(small_run(tmp_path / "whole", "run", *options)).run
    again = resumed_copy(run, tmp_path / "again", 1, *options, "offload.optimizer=true")
    assert _weights(again) == _weights(run)
    assert steady_metrics(again) == steady_metrics(run)
    with pytest.raises(ValueError, match="the arrays of a checkpoint must have the names, shapes and dtypes"):
        train(small_run(tmp_path / "whole", "run", *SMALLER, *SHORT, "run.steps=4"), resume="run")


def _stopped_and_resumed(folder, *options):
    with interrupted_after(3), pytest.raises(KeyboardInterrupt):
        train(small_run(folder, "stopped", *options))
    return train(small_run(folder, "stopped", *options), resume="stopped").run


@pytest.mark.slow
def test_resumed_and_offloaded_is_the_same_run_to_the_bit(whole, tmp_path):
    """From a checkpoint at whose step the reference has not taken the policy over yet."""
    run = resumed_copy(whole, tmp_path, 1, *SMALLER, *SHORT, "offload.policy=true")
    assert _weights(run) == _weights(whole)
    assert steady_metrics(run) == steady_metrics(whole)


@pytest.mark.slow
def test_adapters_and_their_base_may_wait_on_the_host(tmp_path):
    """Their rollout has merged copies; the reference is the base, with the adapters of a warm start."""
    plain = train(small_run(tmp_path, "plain", *ADAPTERS)).run
    run = _stopped_and_resumed(tmp_path, *ADAPTERS, "offload.policy=true")
    assert _weights(run) == _weights(plain)
    assert steady_metrics(run) == steady_metrics(plain)


def test_a_resume_with_another_dtype_of_moments_is_refused(whole):
    resolved = small_run(
        whole.parent, "whole", *SMALLER, *SHORT, "run.steps=5", "optimizer.state_dtype=float32"
    )
    message = "optimizer.state_dtype of a resumed run must not change: .* has bfloat16, got float32; set "
    with pytest.raises(ValueError, match=message):
        train(resolved, resume="whole")


def _weights(run):
    return (run / "final" / "model.safetensors").read_bytes()
