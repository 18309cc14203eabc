"""Collectives read from programs: each kind by hand, and a tiny model's beside the formula."""

from dataclasses import replace

import pytest

from quatrain.config.mesh import MeshShape

HLO = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[4]{0})->f32[4]{0}}, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%all-reduce-scatter.1 (p: bf16[64,8]) -> bf16[8,8] {
  %p = bf16[64,8]{1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.9 = bf16[64,8]{1,0:T(8,128)(2,1)} all-reduce(%p), replica_groups={{0,1,2,3,4,5,6,7}}
  ROOT %slice = bf16[8,8]{1,0} dynamic-slice(%all-reduce.9, %i, %j), dynamic_slice_sizes={8,8}
}

%wrapped (p: f32[16]) -> f32[16] {
  %p.1 = f32[16]{0} parameter(0)
  ROOT %all-to-all.2 = f32[16]{0} all-to-all(%p.1), channel_id=9, replica_groups=[2,4]<=[8], dimensions={0}
}

%overlapped.1 (p: bf16[10]) -> bf16[40] {
  %all-gather.8 = bf16[40]{0} all-gather(%p), replica_groups=[2,4]<=[8], frontend_attributes={chain_id="3"}
}

%overlapped.2 (p: bf16[10]) -> bf16[40] {
  %all-gather.9 = bf16[40]{0} all-gather(%p), replica_groups=[2,4]<=[8], frontend_attributes={chain_id="3"}
}

%body (state: (s32[], f32[4])) -> (s32[], f32[4]) {
  %psum.3 = (f32[4]{0}, f32[2,2]{1,0}, /*index=2*/f32[]) all-reduce(%a, %b), replica_groups={}, to_apply=%add
}

ENTRY %main.1_spmd (param: f32[4]) -> f32[4] {
  %param = f32[4]{0} parameter(0)
  %all-gather.1 = f16[24,8]{0,1} all-gather(%h), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={1}
  %all-gather-start.2 = ((bf16[2,8], f32[3]{0}), (bf16[8,8]{1,0:T(8,128)}, f32[12]{0})) \
all-gather-start(%c, %d), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  %all-gather-done.2 = (bf16[8,8], f32[12]) all-gather-done(%all-gather-start.2)
  %reduce-scatter.1 = f32[5]{0} reduce-scatter(%k), replica_groups=[4,2]<=[8], dimensions={0}, to_apply=%add
  %all-reduce-start.1 = bf16[100]{0} all-reduce-start(%e), replica_groups=mesh['a'=4,'b'=2] {'a'}
  %all-reduce-done.1 = bf16[100]{0} all-reduce-done(%all-reduce-start.1)
  %all-reduce.7 = s32[2]{0} all-reduce(%f), \
replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}
  %collective-permute-start.1 = (f32[6]{0}, f32[6]{0}, u32[], u32[]) collective-permute-start(%g), \
source_target_pairs={{0,1},{1,0}}
  %collective-permute-done.1 = f32[6]{0} collective-permute-done(%collective-permute-start.1)
  %all-to-all.1 = (u8[3]{0}, u8[3]{0}) all-to-all(%l, %m), replica_groups={{0,4},{1,5},{2,6},{3,7}}
  %async-start = ((f32[16]), f32[16], u32[]) async-start(%n), calls=%wrapped
  %async-done = f32[16] async-done(%async-start)
  %fusion.1 = bf16[8,8]{1,0} fusion(%o), kind=kCustom, calls=%all-reduce-scatter.1
  %fusion.2 = bf16[40]{0} fusion(%o), kind=kCustom, calls=%overlapped.1
  %fusion.3 = bf16[40]{0} fusion(%fusion.2), kind=kCustom, calls=%overlapped.2
  %while.1 = (s32[], f32[4]{0}) while(%state), condition=%cond, body=%body
}
"""
TINY = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


@pytest.fixture(scope="module")
def scaling(load_script):
    return load_script("scaling")


def test_each_kind_is_read_with_its_bytes_and_groups(scaling):
    read = [
        (one.kind, one.dtype, one.payload, one.size, one.stride, one.loops)
        for one in scaling.collectives(HLO)
    ]
    assert read == [
        ("all-gather", "f16", 24 * 8 * 2, 4, 1, 0),
        ("all-gather", "bf16+f32", 8 * 8 * 2 + 12 * 4, 4, 2, 0),
        ("reduce-scatter", "f32", 5 * 4 * 2, 2, 1, 0),
        ("all-reduce", "bf16", 200, 4, 2, 0),
        ("all-reduce", "s32", 8, 4, 2, 0),
        ("collective-permute", "f32", 24, 2, 0, 0),
        ("all-to-all", "u8", 6, 2, 4, 0),
        ("all-to-all", "f32", 64, 4, 1, 0),
        ("reduce-scatter", "bf16", 64 * 8 * 2, 8, 1, 0),
        ("all-gather", "bf16", 80, 4, 1, 0),
        ("all-reduce", "f32", 16 + 16 + 4, 8, 1, 1),
    ]


def test_bytes_that_a_device_sends_in_a_ring(scaling):
    sent = {
        kind: scaling.Collective(kind, "f32", 1000, 4, 1, 0).sent
        for kind in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
    }
    assert sent == {
        "all-gather": 750,
        "reduce-scatter": 750,
        "all-reduce": 1500,
        "all-to-all": 750,
        "collective-permute": 1000,
    }


@pytest.mark.parametrize(
    ("size", "stride", "axis"),
    [(2, 1, "tp"), (4, 2, "fsdp"), (3, 8, "dp"), (12, 2, "data"), (24, 1, "all"), (5, 1, "other")],
)
def test_groups_are_axes_of_the_mesh(scaling, size, stride, axis):
    assert scaling.Collective("all-reduce", "f32", 4, size, stride, 0).axis(MeshShape(3, 4, 2)) == axis


def test_parameters_have_a_group_of_their_own(scaling):
    gather = scaling.Collective("all-gather", "f32", 4, 8, 1, 0)
    assert gather.axis(MeshShape(2, 2, 2, 4)) == "params"
    assert gather.axis(MeshShape(1, 2, 1, 4)) == "all"


def test_other_layers_follow_from_two(scaling):
    figures = {2: {"a": 12.0, "b": 1.0}, 4: {"a": 14.0, "b": 1.0}}
    assert scaling.at_layers(28, figures) == {"a": 38.0, "b": 1.0}


@pytest.mark.slow
def test_a_tiny_model_sends_what_the_formula_says(scaling, monkeypatch):
    """On eight devices; copies for the rollout cost what each device lacks of them."""
    case = scaling.Case(
        MeshShape(2, 2, 2),
        MeshShape(2, 2, 2),
        layers=2,
        model=scaling.QWEN2_5_7B | TINY,
        tokens=128,
        slots=8,
        prompts=2,
        prompt_positions=32,
        own_columns=32,
    )
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    report = scaling.in_child(case, 100)
    for part, kinds in {
        "gradient": {"all-gather fsdp", "reduce-scatter fsdp", "all-reduce fsdp", "all-reduce tp"},
        "apply": {"all-reduce dp"},
        "decode": {"all-gather fsdp", "all-gather tp", "all-reduce tp"},
    }.items():
        sent, formula = scaling.sent_by_kind(report, part), report["expected"][part]
        assert kinds <= set(formula)
        assert {kind: sent[kind] for kind in kinds} == pytest.approx({k: formula[k] for k in kinds}, rel=0.01)
    assert report["sync"] == {}
    assert report["expected"]["sync"] == {"all": 0}
    moving = replace(case, layers=1, mesh=MeshShape(1, 4, 2), rollout=MeshShape(4, 1, 2), parts=("sync",))
    report = scaling.in_child(moving, 100)
    assert sum(scaling.sent_by_kind(report, "sync").values()) == report["expected"]["sync"]["all"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "kv_heads", "split"),
    [((1, 1, 1, 4), 4, "cp"), ((1, 1, 1, 4), 2, "cp"), ((1, 1, 2, 2), 4, "cp"), ((1, 2, 2, 2), 4, "params")],
)
def test_heads_and_columns_are_exchanged_as_the_formula_says(scaling, monkeypatch, mesh, kv_heads, split):
    """Over cp, also with fewer key/value heads than devices; parameters over fsdp and cp together."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    model = scaling.QWEN2_5_7B | TINY | {"num_attention_heads": 8, "num_key_value_heads": kv_heads}
    shape = MeshShape(*mesh)
    case = scaling.Case(shape, shape, layers=2, model=model, tokens=2048, parts=("gradient",))
    report = scaling.in_child(case, 100)
    wanted, sent = report["expected"]["gradient"], scaling.sent_by_kind(report, "gradient")
    names = {"all-to-all cp", f"all-gather {split}", f"reduce-scatter {split}"}
    assert names <= set(wanted)
    assert {name: sent[name] for name in names} == pytest.approx({n: wanted[n] for n in names}, rel=0.01)


@pytest.mark.slow
def test_devices_that_share_tokens_share_the_temporary_memory(scaling):
    """Beside a tile of logits; the vocabulary is too large for all logits to be kept."""
    model = (
        scaling.QWEN2_5_7B | TINY | {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192}
    )

    def temporary(cp: int) -> int:
        shape = MeshShape(1, 1, 1, cp)
        case = scaling.Case(shape, shape, layers=8, model=model, tokens=16384, parts=("gradient",))
        return int(scaling.in_child(case, 300)["gradient"]["temp_bytes"])

    one = temporary(1)
    assert {cp: temporary(cp) <= 1.15 * one / cp for cp in (2, 4)} == {2: True, 4: True}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1, 1, 1, 2), (1, 1, 1, 1, 4), (1, 2, 1, 1, 2)])
def test_experts_exchange_what_the_formula_says(scaling, monkeypatch, mesh):
    """Hidden states, routes and weights over ep; other parameters over fsdp and ep together."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
    model = TINY | experts | {"moe_intermediate_size": 32, "head_dim": 16, "tie_word_embeddings": False}
    shape = MeshShape(*mesh)
    case = scaling.Case(shape, shape, layers=2, model=model, tokens=256, parts=("gradient",))
    report = scaling.in_child(case, 100)
    wanted = report["expected"]["gradient"]
    sent = scaling.sent_by_kind(report, "gradient")
    assert {"all-gather ep", "reduce-scatter ep"} <= set(wanted)
    assert {name: sent[name] for name in wanted} == pytest.approx(wanted, rel=0.01)
