"""Whole runs with adapters: what they save, resume, export and refuse."""

import json
import re

import numpy as np
import pytest
from resumed_runs import resumed_copy
from runs import interrupted_after, small_run, steady_metrics
from safetensors.numpy import load_file
from servers import served

from quatrain.data import policy as policy_module
from quatrain.engine.service import EngineService
from quatrain.loop.export import export
from quatrain.loop.policy import load_policy
from quatrain.loop.serve import serving_engine, weights_of
from quatrain.loop.train import dry_run, train
from quatrain.run.checkpoint import Checkpointer
from quatrain.run.metrics import read_metrics
from quatrain.update.trainer import Trainer
from quatrain.weights.hf import load_hf

pytestmark = pytest.mark.usefixtures("narrow_model")

LORA = (
    "lora.rank=4", "lora.alpha=8", "optimizer.learning_rate=1e-2", "sft.learning_rate=1e-2",
    "update.kl_coef=0.1",
)  # fmt: skip

SHORT = ("run.steps=3", "checkpoint.every_steps=1", "checkpoint.keep=3", "eval.every_steps=0")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(small_run(tmp_path_factory.mktemp("runs"), "whole", *LORA, *SHORT)).run


def test_a_run_saves_adapters_alone(whole):
    saved = Checkpointer(whole / "checkpoints")._read_json(3)
    names = list(saved["arrays"])
    assert names
    assert all("_lora_" in name for name in names if "count" not in name), names
    # After a warm start the reference is the base with the adapters of that time.
    assert {name.split(".")[0] for name in names} == {"params", "opt_state", "reference"}
    assert re.fullmatch("[0-9a-f]{16}", saved["host"]["base"])
    assert not (whole / "reference").exists()


def test_sampler_and_trainer_of_a_run_agree(whole):
    rows = read_metrics(whole / "metrics.jsonl")[1:]
    assert max(row["rollout/logprob_diff_max"] for row in rows) < 1e-4
    assert max(row["update/kl"] for row in rows) > 1e-5
    assert abs(rows[0]["update/kl"]) < 1e-6  # the reference begins as the policy


def test_a_server_gets_adapters_alone_and_samples_as_the_run(whole, tmp_path, monkeypatch):
    """Over HTTP; merged onto another base, or an old version, the gap of log-probabilities would show it."""
    monkeypatch.setenv("QUATRAIN_SERVE_TOKEN", "the-token-of-the-tests")
    config = small_run(tmp_path, "server").config
    loaded = load_policy(config, critic=False, adapters=False, environments=False)
    engine = serving_engine(config, loaded)
    service = EngineService(engine, weights_of(loaded.arch, config, engine))
    with served(service, loaded.arch, loaded.tokenizer, token="the-token-of-the-tests") as url:
        over_http = (f"rollout.servers=[{url}]", "rollout.stream_weights=true")
        run = train(small_run(tmp_path, "served", *LORA, *SHORT, *over_http)).run
        assert service.totals.weight_loads == 4
    rows = read_metrics(run / "metrics.jsonl")[1:]
    assert max(row["rollout/logprob_diff_max"] for row in rows) < 1e-4
    adapter, own = (load_file(each / "final/adapter/adapter_model.safetensors") for each in (run, whole))
    for name, tensor in own.items():
        np.testing.assert_allclose(adapter[name], tensor, atol=2e-3, err_msg=name)
    sizes = re.findall(r"weights of version \d+: ([\d.]+) MB", (run / "run.log").read_text())
    assert len(sizes) == 4
    model = (run / "final" / "model.safetensors").stat().st_size / 1e6
    assert max(map(float, sizes)) < model / 2


def test_the_exported_adapter_and_the_merged_model_are_the_same_model(whole, tmp_path):
    """The arithmetic of peft, on its names: W + (lora_alpha / r) B A."""
    folder = whole / "final" / "adapter"
    config = json.loads((folder / "adapter_config.json").read_text())
    expected = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none"}
    assert config | expected == config
    assert config["base_model_name_or_path"] == str(whole / "final" / "base")
    assert set(config["target_modules"]) == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    adapter = load_file(folder / "adapter_model.safetensors")
    final = load_file(whole / "final" / "model.safetensors")
    base = _base_of(whole, tmp_path)
    changed = 0
    for name, matrix in base.items():
        start = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{start}.lora_A.weight" in adapter:
            a, b = (adapter.pop(f"{start}.lora_{x}.weight") for x in "AB")
            assert a.shape == (4, matrix.shape[1])
            assert b.shape == (matrix.shape[0], 4)
            matrix = matrix + 8 / 4 * b @ a
            changed += 1
        np.testing.assert_allclose(final[name], matrix, atol=1e-6, err_msg=name)
    assert not adapter
    assert changed == 2 * 7
    load_hf(whole / "final")


def _base_of(run, folder):
    """The tensors of the run's base, exported without adapters."""
    from quatrain.config.load import load_config
    from quatrain.loop.export import export_policy

    loaded = load_policy(load_config(run / "config.yaml", environ={}).config, adapters=False)
    export_policy(folder / "base", loaded.arch, loaded.params, loaded.tokenizer)
    assert not (folder / "base" / "adapter").exists()
    return load_file(folder / "base" / "model.safetensors")


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(whole, tmp_path):
    run = resumed_copy(whole, tmp_path, 1, *LORA, *SHORT)
    assert _final(run) == _final(whole)
    assert steady_metrics(run) == steady_metrics(whole)


def _final(run):
    return [
        (run / "final" / name).read_bytes()
        for name in ("model.safetensors", "adapter/adapter_model.safetensors")
    ]


def test_an_earlier_checkpoint_is_exported_with_its_adapter(whole, tmp_path):
    assert export(whole, tmp_path / "two", step=2) == 2
    export(whole, tmp_path / "last")
    files = ("model.safetensors", "adapter/adapter_model.safetensors")
    last, two = ([(tmp_path / each / name).read_bytes() for name in files] for each in ("last", "two"))
    assert last == _final(whole)
    assert last[0] != two[0]
    assert last[1] != two[1]


def test_adapters_of_another_base_are_refused_with_both_fingerprints(whole, tmp_path, monkeypatch):
    known = json.loads((whole / "final" / "adapter" / "base.json").read_text())["fingerprint"]
    assert Checkpointer(whole / "checkpoints").read_host()["base"] == known
    monkeypatch.setattr(policy_module, "tree_fingerprint", lambda tree: "0123456789abcdef")
    monkeypatch.setattr("quatrain.loop.export.tree_fingerprint", lambda tree: "0123456789abcdef")
    both = f"fingerprint {known}, and builtin:tiny has 0123456789abcdef"
    with pytest.raises(ValueError, match=both):
        export(whole, tmp_path / "other")
    resolved = small_run(whole.parent, "whole", *LORA, "run.steps=5")
    with pytest.raises(ValueError, match=both):
        train(resolved, resume="whole")


def test_a_resumed_run_keeps_its_adapters(whole):
    for change in ("lora.rank=2", "lora.alpha=4", "lora.targets=[qkv]"):
        resolved = small_run(whole.parent, "whole", *LORA, "run.steps=5", change)
        with pytest.raises(ValueError, match=f"{change.partition('=')[0]} of a resumed run must not change"):
            train(resolved, resume="whole")


def test_a_dry_run_finds_that_the_base_has_another_form(whole):
    """Without its weights: their fingerprint alone tells another base of the same form."""
    resolved = small_run(whole.parent, "whole", *LORA, "run.steps=5")
    dry_run(resolved, resume="whole")
    resolved = small_run(whole.parent, "whole", *LORA, "run.steps=5", "model.param_dtype=bfloat16")
    with pytest.raises(ValueError, match="builtin:tiny in bfloat16 have other names, shapes or dtypes"):
        dry_run(resolved, resume="whole")


@pytest.fixture(scope="module")
def cold(tmp_path_factory):
    """A run without warm start, and of each parameter in each optimizer step: whether it is an adapter's,
    whether the old one is deleted, and whether it is the new one."""
    seen, plain = [], Trainer.step

    def step(self, state, *rest):
        new = plain(self, state, *rest)
        for old, now in zip(state.params["layers"], new.params["layers"], strict=True):
            seen.extend((("_lora_" in name), old[name].is_deleted(), old[name] is now[name]) for name in old)
        return new

    options = (*LORA, "sft.steps=0", "run.steps=2", "eval.every_steps=0", "eval.before=false")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        return train(small_run(tmp_path_factory.mktemp("runs"), "cold", *options)).run, seen


def test_a_reference_without_warm_start_is_the_base(cold):
    run, _ = cold
    names = Checkpointer(run / "checkpoints")._read_json(2)["arrays"]
    assert {name.split(".")[0] for name in names} == {"params", "opt_state"}
    rows = read_metrics(run / "metrics.jsonl")
    assert abs(rows[0]["update/kl"]) < 1e-6
    assert rows[1]["update/kl"] > 1e-6


def test_the_base_is_never_donated(cold):
    """Training frees the adapters of the step before, and nothing of the base."""
    _, seen = cold
    assert {(lora, same) for lora, _, same in seen} == {(True, False), (False, True)}
    assert not any(gone for lora, gone, _ in seen if not lora)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["merged", "adapter"])
@pytest.mark.parametrize("in_flight", [False, True])
def test_rollouts_ahead(tmp_path, way, in_flight):
    options = (
        *LORA, "rollout.max_staleness=1", "update.reference_sync_steps=2", f"rollout.lora={way}",
        f"rollout.in_flight={str(in_flight).lower()}",
    )  # fmt: skip
    whole = train(small_run(tmp_path, "whole", *options)).run
    rows = read_metrics(whole / "metrics.jsonl")[1:]
    assert max(row["async/staleness_max"] for row in rows) == 1
    if in_flight:  # tokens depend on timing
        return
    with interrupted_after(3), pytest.raises(KeyboardInterrupt):
        train(small_run(tmp_path, "stopped", *options))
    run = train(small_run(tmp_path, "stopped", *options), resume="stopped").run
    assert _final(run) == _final(whole)
    assert steady_metrics(run) == steady_metrics(whole)
