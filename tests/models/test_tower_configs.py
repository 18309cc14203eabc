"""What config.json and preprocessor_config.json say of towers, and the geometry of pictures."""

from dataclasses import replace

import pytest
from towers import CONFIGS, PROCESSORS, seeing

from quatrain.config.mesh import MeshShape
from quatrain.models.families import architecture_from_hf
from quatrain.models.families.multimodal import text_tensors
from quatrain.models.params import num_params, param_specs, partition
from quatrain.models.vision import Cells


@pytest.mark.parametrize(
    ("size", "tiles", "placeholders"),
    [
        # By the image processor of transformers: rows and columns of tiles, to which the whole is added.
        ((40, 40), (2, 2), 45),
        ((100, 37), (1, 2), 27),
        ((9, 50), (2, 1), 27),
        ((3, 5), (2, 2), 45),
        ((300, 2), (1, 2), 27),
    ],
)
def test_idefics3_cuts_pictures_into_tiles(size, tiles, placeholders):
    vision = seeing("smolvlm").vision
    assert vision.tiles(size) == tiles
    assert vision.num_placeholders(size) == placeholders
    assert vision.num_patches(size) == 4 * placeholders
    assert vision.seen_size(size) == (12 * tiles[1], 12 * tiles[0])
    assert not vision.has_grid


def test_small_pictures_and_unsplit_ones_are_one_tile():
    vision = seeing("idefics3").vision
    whole = replace(vision, longest_edge=12)
    unsplit = architecture_from_hf(
        CONFIGS["idefics3"], vision={**PROCESSORS["idefics3"], "do_image_splitting": False}
    ).vision
    for one in (whole, unsplit):
        assert one.tiles((40, 30)) == (0, 0)
        assert one.num_placeholders((40, 30)) == 9
        assert one.seen_size((40, 30)) == (12, 12)


@pytest.mark.parametrize(
    ("edge", "size", "seen"),
    [
        (1456, (640, 481), (1456, 1456)),
        (1456, (1000, 300), (1456, 728)),
        (1456, (37, 100), (728, 1456)),
        # Sides above 4,096 pixels are bounded before they are rounded up to tiles.
        (5000, (640, 481), (4368, 3640)),
        (5000, (481, 640), (3640, 4368)),
        (5000, (1000, 300), (4368, 1456)),
        (5000, (37, 100), (1820, 4368)),
    ],
)
def test_idefics3_resizes_as_its_image_processor(edge, size, seen):
    assert replace(seeing("idefics3").vision, patch=14, longest_edge=edge, tile=364).seen_size(size) == seen


@pytest.mark.parametrize(
    ("size", "seen"),
    [
        # By transformers' smart_resize with 256 to 4,096 pixels.
        ((40, 40), (40, 40)),
        ((100, 37), (96, 40)),
        ((9, 50), (8, 48)),
        ((640, 480), (72, 48)),
        ((20, 4), (40, 8)),
        ((1, 150), (8, 200)),
        ((5, 11), (16, 24)),
        ((12, 12), (16, 16)),
    ],
)
def test_qwen_resizes_as_its_image_processor(size, seen):
    vision = seeing("qwen3_vl").vision
    assert vision.seen_size(size) == seen
    assert vision.cells(size) == (seen[1] // 8, seen[0] // 8)
    assert vision.num_placeholders(size) == seen[0] * seen[1] // 64
    assert vision.num_patches(size) == seen[0] * seen[1] // 16
    assert vision.grids(size) == [Cells(seen[1] // 4, seen[0] // 4)]
    assert vision.has_grid


@pytest.mark.parametrize("model_type", CONFIGS)
def test_pictures_of_extreme_ratios_are_refused(model_type):
    vision = seeing(model_type).vision
    vision.num_placeholders((200, 1))
    with pytest.raises(ValueError, match="at most 200 times as long as it is wide; got 1 x 201 pixels"):
        vision.num_placeholders((1, 201))


@pytest.mark.parametrize("model_type", CONFIGS)
def test_without_its_processor_a_folder_is_its_text_part(model_type):
    text, sees = architecture_from_hf(CONFIGS[model_type]), seeing(model_type)
    assert text.vision is None
    assert sees.text == text
    assert "vision" not in param_specs(text)


def test_limits_of_pixels_have_the_defaults_of_transformers():
    # Qwen2.5-VL's first folders say min_pixels and max_pixels, and have the text's keys beside the others.
    whole = CONFIGS["qwen2_5_vl"]
    flat = {**whole["text_config"], **whole}
    del flat["text_config"]
    given = architecture_from_hf(flat, vision={"min_pixels": 64, "max_pixels": 1280}).vision
    assert (given.min_pixels, given.max_pixels) == (64, 1280)
    assert given.block == seeing("qwen2_5_vl").vision.block
    default = architecture_from_hf(flat, vision={}).vision
    assert (default.min_pixels, default.max_pixels) == (56 * 56, 28 * 28 * 1280)
    tiles = architecture_from_hf(
        {**CONFIGS["idefics3"], "vision_config": {**CONFIGS["idefics3"]["vision_config"], "patch_size": 13}}
        | {
            "vision_config": {
                "hidden_size": 32,
                "num_attention_heads": 2,
                "image_size": 364,
                "patch_size": 14,
            }
        },
        vision={},
    ).vision
    assert (tiles.longest_edge, tiles.tile, tiles.splits) == (4 * 364, 364, True)


def test_missing_keys_have_the_defaults_of_transformers():
    # SmolVLM2-256M: SigLIP base, 12 blocks of 7,087,872; patches 590,592; positions 786,432; a norm of 1,536.
    small = {"hidden_size": 768, "image_size": 512, "num_attention_heads": 12, "patch_size": 16}
    config = {**CONFIGS["smolvlm"], "scale_factor": 4, "vision_config": small}
    tiles = {"max_image_size": {"longest_edge": 512}}
    assert tower_params(architecture_from_hf(config, vision=tiles)) == 86_433_024
    # Qwen2.5-VL, without the keys that its first folders lack.
    sizes = {"hidden_size": 1280, "depth": 32, "num_heads": 16, "in_chans": 3, "hidden_act": "silu"}
    config = {**CONFIGS["qwen2_5_vl"], "vision_config": {**sizes, "out_hidden_size": 32}}
    vision = architecture_from_hf(config, vision={}).vision
    assert (vision.patch, vision.merge, vision.window, vision.whole) == (14, 2, 4, (7, 15, 23, 31))
    # Qwen3-VL-8B has deepstack after blocks 8, 16 and 24 where its file does not say it; Qwen3.5 has none.
    sizes = {"out_hidden_size": 32, "deepstack_visual_indexes": [8, 16, 24]}
    for model_type, levels in (("qwen3_vl", (8, 16, 24)), ("qwen3_5", ())):
        vision = architecture_from_hf({**CONFIGS[model_type], "vision_config": sizes}, vision={}).vision
        assert (vision.deepstack, vision.depth, vision.table_side) == (levels, 27, 48)
    del sizes["deepstack_visual_indexes"]
    assert architecture_from_hf({**CONFIGS["qwen3_vl"], "vision_config": sizes}, vision={}).vision.levels == 3


def tower_params(arch):
    """Numbers of the tower without its projector."""
    arch = replace(arch, vision=replace(arch.vision, trained="all"))
    text = num_params(replace(arch, vision=None))
    projector = arch.vision.out_size * arch.vision.block.size * arch.vision.merge**2
    return num_params(arch) - text - projector


REFUSED = {
    "gemma3": ({"model_type": "gemma3"}, "of its pictures attend to each other in both directions"),
    "none": ({"vision_config": None}, "pictures need a model whose tower is supported"),
    "heads": ({"vision_config": {"num_heads": 3}}, "hidden_size of the tower must be a multiple of 3 heads"),
    "turns": ({"vision_config": {"num_heads": 16}}, "head size of the tower must be a multiple of 4; got 2"),
    "activation": ({"vision_config": {"hidden_act": "relu"}}, "hidden_act must be one of silu"),
    "positions": ({"vision_config": {"num_position_embeddings": 35}}, "must be a square; got 35"),
    "out": ({"vision_config": {"out_hidden_size": 64}}, "must be the hidden size 32 of texts; got 64"),
    "levels": ({"vision_config": {"deepstack_visual_indexes": [2, 0]}}, "ascending numbers below 4"),
    "layers": ({"vision_config": {"deepstack_visual_indexes": [0, 1, 2, 3]}}, "at most 3, one a text layer"),
    "behind": ({"vision_config": {"deepstack_visual_indexes": [4]}}, "ascending numbers below 4"),
    "rope": ({"vision_config": {"rope_parameters": {"rope_type": "yarn"}}}, "rope_type must be axial"),
    "type": ({"vision_config": {"depth": "4"}}, "depth"),
    "channels": ({"vision_config": {"in_channels": 4}}, "in_channels of the tower must be 3"),
    "placeholder": ({"image_token_id": -1}, "image_token_id"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_is_not_supported_is_refused_with_the_reason(change):
    changed, message = REFUSED[change]
    config = {**CONFIGS["qwen3_vl"], **changed}
    if change == "gemma3":
        config["text_config"] = {
            **config["text_config"],
            "model_type": "gemma3_text",
            "rope_parameters": None,
        }
    elif changed.get("vision_config"):
        config["vision_config"] = {**CONFIGS["qwen3_vl"]["vision_config"], **changed["vision_config"]}
    with pytest.raises(ValueError, match=message) as error:
        architecture_from_hf(config, "the/config.json", vision=PROCESSORS["qwen3_vl"])
    assert str(error.value).startswith("the/config.json: ")
    assert str(error.value).count("the/config.json") == 1


@pytest.mark.parametrize(
    ("model_type", "processor", "message"),
    [
        ("qwen3_vl", {"patch_size": 14}, "patch_size of the image processor must be that of the tower, 4"),
        ("qwen3_vl", {"merge_size": 1}, "merge_size of the image processor must be that of the tower, 2"),
        ("qwen3_vl", {"temporal_patch_size": 1}, "temporal_patch_size of the image processor"),
        ("qwen3_vl", {"do_resize": False}, "do_resize of the image processor must be true"),
        ("qwen3_vl", {"image_mean": [0.5, 0.5]}, "image_mean of the image processor must be three"),
        ("qwen3_vl", {"image_std": [0.5, 0.0, 0.5]}, r"image_std.* greater than 0"),
        ("qwen3_vl", {"rescale_factor": "1/255"}, "rescale_factor"),
        ("qwen3_vl", {"resample": 9}, "resample"),
        (
            "smolvlm",
            {"max_image_size": {"longest_edge": 14}},
            "max_image_size must be a multiple of 4 pixels",
        ),
        ("smolvlm", {"size": {"longest_edge": 0}}, "size.longest_edge"),
    ],
)
def test_an_image_processor_that_does_not_fit_the_tower_is_refused(model_type, processor, message):
    with pytest.raises(ValueError, match=message):
        architecture_from_hf(CONFIGS[model_type], vision={**PROCESSORS[model_type], **processor})


def test_a_window_has_a_feature_at_least():
    config = {**CONFIGS["qwen2_5_vl"]}
    config["vision_config"] = {**config["vision_config"], "window_size": 7}
    with pytest.raises(ValueError, match="window_size must be at least 8 pixels; got 7"):
        architecture_from_hf(config, vision=PROCESSORS["qwen2_5_vl"])


def test_a_side_of_whole_patches():
    config = {**CONFIGS["smolvlm"]}
    config["vision_config"] = {**config["vision_config"], "image_size": 15}
    with pytest.raises(ValueError, match="image_size must be a multiple of patch_size 2; got 15"):
        architecture_from_hf(config, vision=PROCESSORS["smolvlm"])


def test_tensors_of_the_tower_in_folders_of_both_libraries():
    names = [
        "model.language_model.norm.weight",
        "lm_head.weight",
        "model.visual.pos_embed.weight",
        "mtp.fc.weight",
    ]
    older = ["model.norm.weight", "visual.merger.ln_q.weight", "model.text_model.layers.0.x"]
    ours, others = text_tensors([*names, *older, "model.connector.a"], tower=True)
    assert ours == {
        "lm_head.weight": "lm_head.weight",
        "visual.pos_embed.weight": "model.visual.pos_embed.weight",
        "model.norm.weight": "model.norm.weight",
        "visual.merger.ln_q.weight": "visual.merger.ln_q.weight",
        "model.layers.0.x": "model.text_model.layers.0.x",
        "connector.a": "model.connector.a",
    }
    assert others == ["mtp.fc.weight"]
    _, others = text_tensors([*names, *older, "model.connector.a"])
    assert others == [
        "model.visual.pos_embed.weight",
        "mtp.fc.weight",
        "visual.merger.ln_q.weight",
        "model.connector.a",
    ]


@pytest.mark.parametrize("model_type", ["smolvlm", "qwen3_vl", "qwen2_5_vl"])
def test_a_tower_is_sharded_over_fsdp_and_whole_over_tp(model_type):
    arch = seeing(model_type)
    specs = partition(arch, MeshShape(fsdp=2, tp=2))["vision"]
    matrices = [specs["patch"], *(specs["blocks"][0][name] for name in ("qkv", "o", "gate_up", "down"))]
    for spec in [*matrices, specs["merger"]["down"]]:
        assert [*spec].count("fsdp") == 1
        assert "tp" not in spec
