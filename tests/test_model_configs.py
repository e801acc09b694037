"""From a config.json to MLA dims: the shapes that real files have, and the ones that only a damaged file has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from mla_prefill.capabilities.configs import (
    MAX_BYTES,
    ConfigError,
    ModelDims,
    NotMLA,
    Unknown,
    UnknownModelError,
    find_model,
    read_config,
)

CAPABILITIES = Path(__file__).parent.parent / "capabilities"
HF_CONFIGS = Path(__file__).parent / "data" / "hf_configs"
SHEET = yaml.safe_load((CAPABILITIES / "data" / "models.yaml").read_text(encoding="utf-8"))
FAMILIES: dict[str, dict[str, Any]] = SHEET["models"]
WITH_DIMS = {family: rules for family, rules in FAMILIES.items() if "dims" in rules}

V3 = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512, "num_attention_heads": 8}


def config(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((HF_CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def dims_of(source: Any) -> ModelDims:
    answer = read_config(source, FAMILIES)
    assert isinstance(answer, ModelDims), answer
    return answer


# ---- the given files ----

#: file: family, dims, heads, kv_lora_rank, where the fields are
MLA_FILES = {
    "deepseek_v3": ("deepseek_v3", (128, 64, 128), 128, 512, "top level"),
    "deepseek_v2_lite": ("deepseek_v2_lite", (128, 64, 128), 16, 512, "top level"),
    "deepseek_v3_2": ("deepseek_v3_2", (128, 64, 128), 128, 512, "top level"),
    "deepseek_vl2_small": ("deepseek_vl2_small", (128, 64, 128), 16, 512, "language_config"),
    "kimi_k2": ("kimi_k2", (128, 64, 128), 64, 512, "top level"),
    "kimi_k25": ("kimi_k25", (128, 64, 128), 64, 512, "text_config"),
    "kimi_linear": ("kimi_linear", (128, 64, 128), 32, 512, "top level"),
    "glm_4_7_flash": ("glm_4_7_flash", (192, 64, 256), 20, 512, "top level"),
    "glm_5_2": ("glm_5", (192, 64, 256), 64, 512, "top level"),
    "glm_5_3_flash": ("glm_5_3_flash", (256, 0, 256), 64, 512, "text_config"),
    "mistral_small_4": ("mistral_small_4", (64, 64, 128), 32, 256, "text_config"),
    "mistral_small_4_params": ("mistral_small_4", (64, 64, 128), 32, 256, "top level"),
    "minicpm3": ("minicpm3", (64, 32, 64), 40, 256, "top level"),
    "longcat_flash_chat": ("longcat_flash", (128, 64, 128), 64, 512, "top level"),
    "ling_3_flash": ("ling_3_flash", (128, 64, 128), 32, 512, "top level"),
    "openpangu_ultra": ("openpangu_ultra_moe", (128, 64, 128), 128, 512, "top level"),
    "dots3_note": ("dots3_note", (128, 64, 128), 128, 512, "top level"),
}
NOT_MLA_FILES = {
    "deepseek_v4_flash": "(448, 64, 512)",
    "deepseek_ocr": "use_mla: false",
    "gpt_oss_20b": "no kv_lora_rank",
}
#: file: the layers with the dims, numbered from 0
SOME_LAYERS = {
    "kimi_linear": (3, 7, 11, 15, 19, 23, 26),
    "glm_5_3_flash": (3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43),
    "ling_3_flash": (5, 11, 17, 23, 29, 35, 41),
    "dots3_note": (0, *range(1, 46, 4)),
}


def test_every_given_file_is_in_a_table() -> None:
    assert {path.stem for path in HF_CONFIGS.glob("*.json")} == MLA_FILES.keys() | NOT_MLA_FILES.keys()


@pytest.mark.parametrize("name", MLA_FILES)
def test_the_dims_of_a_given_file(name: str) -> None:
    found = dims_of(HF_CONFIGS / f"{name}.json")
    assert (found.family, found.dims, found.num_attention_heads, found.kv_lora_rank, found.location) == MLA_FILES[name]
    assert found.layers == SOME_LAYERS.get(name)


@pytest.mark.parametrize("name", NOT_MLA_FILES)
def test_a_lookalike_says_why_it_is_not_mla(name: str) -> None:
    answer = read_config(HF_CONFIGS / f"{name}.json", FAMILIES)
    assert isinstance(answer, NotMLA)
    assert NOT_MLA_FILES[name] in answer.reason


def test_a_second_geometry_comes_with_its_layers() -> None:
    found = dims_of(config("dots3_note"))
    (other,) = found.other_dims
    assert other.dims == (192, 64, 128)
    assert (other.num_attention_heads, other.kv_lora_rank) == (64, 1024)
    assert other.layers is not None
    assert found.layers is not None
    assert sorted(found.layers + other.layers) == list(range(46))


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("deepseek_vl2_small", "qk_nope_head_dim 128, qk_rope_head_dim 64, v_head_dim 128, kv_lora_rank 512"),
        ("minicpm3", "v_head_dim 64"),
        ("kimi_linear", "these dims are on 7 of 27 layers"),
        ("kimi_linear", "keep the rope columns"),
        ("glm_5_2", "sparse"),
    ],
)
def test_what_the_dims_alone_do_not_say_is_a_note(name: str, note: str) -> None:
    assert any(note in n for n in dims_of(config(name)).notes)


@pytest.mark.parametrize(
    "name", ["deepseek_v3", "kimi_k25", "mistral_small_4", "mistral_small_4_params", "openpangu_ultra"]
)
def test_a_plain_file_has_no_notes(name: str) -> None:
    assert dims_of(config(name)).notes == ()


# ---- the forms a source can take ----


def test_json_of_the_answers() -> None:
    assert dims_of(config("mistral_small_4")).to_dict("mistral_small_4") == {
        "is_mla": True,
        "dims": [64, 64, 128],
        "kv_lora_rank": 256,
        "num_attention_heads": 32,
        "location": "text_config",
        "block": "mistral_small_4",
        "other_dims": [],
        "notes": [],
    }
    (other,) = dims_of(config("dots3_note")).to_dict()["other_dims"]
    assert other.keys() == {"dims", "num_attention_heads", "layers"}
    assert NotMLA("why").to_dict() == {"is_mla": False, "reason": "why"}
    assert Unknown("why").to_dict() == {"is_mla": None, "reason": "why"}
    json.dumps(dims_of(config("dots3_note")).to_dict())


class LoadedConfig:
    """What read_config uses of transformers' PretrainedConfig."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def to_dict(self) -> Any:
        if isinstance(self.content, Exception):
            raise self.content
        return self.content


def test_a_path_a_folder_a_mapping_and_a_loaded_config_give_the_same(tmp_path: Path) -> None:
    path = HF_CONFIGS / "mistral_small_4.json"
    (tmp_path / "config.json").write_bytes(path.read_bytes())
    (tmp_path / "params.json").write_bytes((HF_CONFIGS / "gpt_oss_20b.json").read_bytes())
    expected = dims_of(path)
    for source in (str(path), tmp_path, config("mistral_small_4"), LoadedConfig(config("mistral_small_4"))):
        assert dims_of(source) == expected


def test_a_folder_with_only_params_json(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_bytes((HF_CONFIGS / "mistral_small_4_params.json").read_bytes())
    assert dims_of(tmp_path).family == "mistral_small_4"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_other_unicode_encodings_are_read(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(json.dumps(V3).encode(encoding))
    assert dims_of(path).dims == (128, 64, 128)


def test_of_a_repeated_key_the_last_counts_as_in_every_engine(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(V3)[:-1] + ', "v_head_dim": 192}')
    assert dims_of(path).dims == (128, 64, 192)


# ---- rules that a single file shows best ----


@pytest.mark.parametrize(
    ("content", "dims"),
    [
        ({**V3, "model_type": "glm_moe_dsa", "head_dim": 192, "qk_nope_head_dim": 192}, (192, 64, 128)),
        ({**V3, "model_type": "glm4_moe_lite", "head_dim": 128}, (128, 64, 128)),  # head_dim is never the rope
        ({**V3, "qk_rope_head_dim": 0}, (128, 0, 128)),
        ({**V3, "qk_nope_head_dim": 0}, (0, 64, 128)),
        ({**V3, "q_lora_rank": 0}, (128, 64, 128)),
        ({**V3, "num_key_value_heads": 1}, (128, 64, 128)),
        ({"model_type": "mistral4", **V3}, (128, 64, 128)),  # a text part that stands alone
        ({"model_type": "kimi_k25", **V3}, (128, 64, 128)),  # flattened by hand
        ({"text_config": {}, **V3}, (128, 64, 128)),
        ({"text_config": None, **V3}, (128, 64, 128)),
        ({"vision_config": {"num_attention_heads": 3}, "llm_config": V3}, (128, 64, 128)),
        ({"thinker_config": {"text_config": V3, "audio_config": {}}}, (128, 64, 128)),
        ({"model_type": "deepseek_vl_v2", "language_config": {"hidden_size": 2560}}, (128, 64, 128)),
        ({"model_type": "pangu_ultra_moe", **V3}, (128, 64, 128)),  # the release with the usual names
        ({"model_type": "minicpm3", **V3, "v_head_dim": None, "hidden_size": 512}, (128, 64, 64)),
        ({"model_type": ["x"], "architectures": "DeepseekV3ForCausalLM", **V3}, (128, 64, 128)),
        ({"n": float("nan"), **V3}, (128, 64, 128)),
    ],
)
def test_these_are_mla(content: dict[str, Any], dims: tuple[int, int, int]) -> None:
    assert dims_of(content).dims == dims


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (without(V3, "kv_lora_rank"), "no kv_lora_rank"),
        ({**V3, "kv_lora_rank": None}, "kv_lora_rank is null"),
        ({**V3, "kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ({**V3, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0}, "both 0"),
        ({**V3, "use_mla": False}, "use_mla: false"),
        ({**V3, "is_causal": False}, "is_causal: false"),
        ({"is_causal": False, "text_config": V3}, "is_causal: false"),
        ({"model_type": "deepseek_v3", "architectures": ["DeepseekV3BidirectionalModel"], **V3}, "bidirectional"),
        ({"model_type": "deepseek_vl_v2", "language_config": {"kv_lora_rank": None}}, "kv_lora_rank is null"),
        ({"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_ref", "head_dim": 512}, "(448, 64, 512)"),
        ({"model_type": "deepseek_v41", "text_config": {"head_dim": 512}}, "DeepSeek-V4.1"),
        ({"model_type": "mimo_v2_flash", "head_dim": 192, "v_head_dim": 128}, "no kv_lora_rank"),
        ({"model_type": "llama", "num_attention_heads": 32, "head_dim": 128}, "no kv_lora_rank"),
        (
            {"model_type": "mistral3", "text_config": {"model_type": "mistral", "num_attention_heads": 32}},
            "no kv_lora_rank",
        ),
        (
            {"dim": 5120, "n_layers": 40, "n_heads": 32, "kv_lora_rank": None, "v_head_dim": None},
            "kv_lora_rank is null",
        ),
        ({"dim": 5120, "n_layers": 40, "n_heads": 32}, "no kv_lora_rank"),
        (
            {"model_type": "kimi_linear", **V3, "linear_attn_config": {"full_attn_layers": [], "kda_layers": [1]}},
            "no layer that uses MLA",
        ),
    ],
)
def test_these_are_not_mla(content: dict[str, Any], reason: str) -> None:
    answer = read_config(content, FAMILIES)
    assert isinstance(answer, NotMLA)
    assert reason in answer.reason


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"model_type": "kimi_k25", "vision_config": {"num_attention_heads": 16}}, "under text_config"),
        ({"model_type": "deepseek_vl_v2", "language_config": None, "num_attention_heads": 8}, "under language_config"),
        ({"model_type": "mistral_large4", "text_config": {}}, "under text_config"),
        ({}, "describes no attention"),
        ({"model_type": "deepseek_v3"}, "describes no attention"),
        ({"architectures": None, "vision_config": {"num_attention_heads": 16}}, "describes no attention"),
        (without(V3, "v_head_dim"), "no v_head_dim"),
        (without(V3, "v_head_dim", "qk_rope_head_dim"), "no qk_rope_head_dim and no v_head_dim"),
        ({"model_type": "minicpm3", **without(V3, "v_head_dim")}, "no v_head_dim"),  # and no hidden_size to tell it
    ],
)
def test_these_files_cannot_tell(content: dict[str, Any], reason: str) -> None:
    answer = read_config(content, FAMILIES)
    assert isinstance(answer, Unknown)
    assert reason in answer.reason


@pytest.mark.parametrize(
    ("content", "note"),
    [
        ({"model_type": "brand_new", **V3}, "not in the model sheet"),
        ({"model_type": "deepseek_v3", **V3, "v_head_dim": 96}, "have (128, 64, 128) or (128, 64, 192)"),
        ({"model_type": "deepseek_v3", **V3, "qk_head_dim": 256}, "qk_head_dim is 256 in the file, but"),
        (
            {"model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"], **V3, "use_mla_nope": True},
            "vLLM",
        ),
        ({"model_type": "bailing_hybrid", **V3, "num_hidden_layers": 20}, "does not say which"),
        ({"model_type": "dots3_note", **V3, "layer_types": ["sliding_attention"]}, "swa_qk_nope_head_dim is missing"),
    ],
)
def test_a_doubt_is_a_note(content: dict[str, Any], note: str) -> None:
    assert any(note in n for n in dims_of(content).notes)


@pytest.mark.parametrize(
    ("content", "layers"),
    [
        ({"model_type": "glm5_next", "num_hidden_layers": 6}, (3,)),
        ({"model_type": "bailing_hybrid", "layer_group_size": 4, "num_hidden_layers": 10}, (3, 7, 8, 9)),
        ({"model_type": "gigachat3_5", "full_attention_layers": [8, 0, 4]}, (0, 4, 8)),
        ({"model_type": "gigachat3_5", "layer_types": ["linear_attention", "full_attention", "attention"]}, (1, 2)),
        ({"model_type": "kimi_k3", "linear_attn_config": {"full_attn_layers": [92, 93]}}, (91, 92)),
        ({"model_type": "kimi_linear", "layer_types": ["linear_attention", "full_attention"]}, (1,)),  # as saved again
        ({"model_type": "glm5_next_text", "layer_types": ["linear_attention", "indexed_attention"]}, (1,)),
        ({"model_type": "deepseek_v3", "linear_attn_config": {"full_attn_layers": [92, 93]}}, None),
    ],
)
def test_the_layers_with_mla_are_numbered_from_0(content: dict[str, Any], layers: tuple[int, ...] | None) -> None:
    assert dims_of({**V3, **content}).layers == layers


def test_a_family_that_shares_its_layout_is_told_by_its_numbers() -> None:
    layout = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    assert dims_of({**layout, **V3, "num_attention_heads": 16}).family == "moonlight"
    assert dims_of({**layout, **V3, "v_head_dim": 192, "num_attention_heads": 32}).family == "gigachat3"
    assert dims_of({**layout, **V3, "num_attention_heads": 7}).family == "deepseek_v3"


# ---- bad input: one line, whatever it is ----

DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b" \n", "the file is empty"),
        (b"\xef\xbb\xbf", "1:1: not JSON"),
        (b"not json", ":1:1: not JSON"),
        (b'{"kv_lora_rank": 512\n"q', ":2:1: not JSON"),
        (b"<!DOCTYPE html>", "not JSON"),
        (b"\x80\x02}q\x00", "not text"),
        (b'{"name": "\xff"}', "byte 10 is not utf-8"),
        (b"\xff\xfe{", "not text"),
        (b"[1, 2]", "holds a list, not an object"),
        (b"null", "holds null, not an object"),
        (b'"x"', 'holds "x", not an object'),
        (b"NaN", "holds NaN, not an object"),
        pytest.param(DEEP, "nested too deeply", id="deep"),
        pytest.param(b'{"a":' + DEEP, "nested too deeply", id="deep in an object"),
        pytest.param(b'{"kv_lora_rank": ' + b"9" * 5000 + b"}", "digits", id="5000 digits"),
        pytest.param(b" " * (MAX_BYTES + 1), "larger than 32 MiB", id="huge"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_config(path, FAMILIES)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 120


@pytest.mark.parametrize("field", V3)
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (-1, "got -1"),
        (10**12, "got 1000000000000"),
        pytest.param(10**5000, "got a number of", id="5000 digits"),
        ("64", 'got "64"; write 64 without quotes'),
        ("sixty-four", 'got "sixty-four"'),
        (64.0, "got 64.0; write 64"),
        (64.5, "got 64.5"),
        (float("nan"), "got NaN"),
        (float("inf"), "got Infinity"),
        (True, "got true"),
        (False, "got false"),
        ([64], "got a list"),
        ({"a": 1}, "got an object"),
        pytest.param("x\n" * 1000, "...", id="long"),
        ("\ud800", '"\\ud800"'),
    ],
)
def test_nonsense_numbers_are_one_line_with_the_field(field: str, value: Any, shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config({"text_config": {**V3, field: value}}, FAMILIES)
    message = str(caught.value)
    assert message.startswith(f"config: text_config.{field} must be a whole number from ")
    assert shown in message
    assert "\n" not in message
    message.encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({**V3, "v_head_dim": 0}, "v_head_dim: a head cannot be 0 wide"),
        ({**V3, "num_attention_heads": 0}, "num_attention_heads must be a whole number from 1"),
        ({**without(V3, "kv_lora_rank"), "v_head_dim": -8}, "v_head_dim must be"),  # nonsense before any verdict
        ({**V3, "use_mla": False, "v_head_dim": "128"}, "v_head_dim must be"),
        ({"model_type": "pangu_ultra_moe", "attention_v_dim": -1}, "attention_v_dim must be"),  # the name in the file
        ({"model_type": "dots3_note", **V3, "swa_v_head_dim": 10**12}, "swa_v_head_dim must be"),
        ({"model_type": "kimi_linear", **V3, "linear_attn_config": {"full_attn_layers": 3}}, "must be a list, got 3"),
        ({"model_type": "kimi_linear", **V3, "linear_attn_config": {"full_attn_layers": [0]}}, "full_attn_layers[0]"),
        (
            {"model_type": "kimi_k3", **V3, "num_hidden_layers": 4, "linear_attn_config": {"full_attn_layers": [4, 5]}},
            "full_attn_layers[1] must be a whole number from 1 to 4, got 5",
        ),
        ({"model_type": "bailing_hybrid", **V3, "layer_group_size": 0}, "layer_group_size must be"),
        ({"model_type": "bailing_hybrid", **V3, "layer_group_size": [4, 4]}, "layer_group_size must be"),
        ({"model_type": "dots3_note", **V3, "layer_types": "full_attention"}, "layer_types must be a list"),
        ({"model_type": "minicpm3", **without(V3, "v_head_dim"), "hidden_size": -5}, "hidden_size must be"),
    ],
)
def test_other_nonsense_names_the_field(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(content, FAMILIES)
    assert message in str(caught.value)


def test_layer_types_of_a_second_geometry_may_hold_anything() -> None:
    found = dims_of({**config("dots3_note"), "layer_types": ["full_attention", None, {"a": 1}, "sliding_attention"]})
    assert found.layers == (0,)
    assert found.other_dims[0].layers == (3,)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no/such/config.json", "no/such/config.json: cannot be read: No such file or directory"),
        ("a\0b", r"'a\x00b': cannot be read"),
        ("a\nb", r"'a\nb': cannot be read"),
        pytest.param("x" * 5000, "cannot be read: File name too long", id="long name"),
        (b"config.json", "expected a path, a mapping or an object with to_dict(), got bytes"),
        (None, "got NoneType"),
        (["config.json"], "got list"),
        (LoadedConfig(None), "LoadedConfig.to_dict() gave null"),
        (LoadedConfig(RuntimeError("varies per layer")), "LoadedConfig.to_dict() failed with RuntimeError"),
    ],
)
def test_a_source_that_is_no_config(source: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(source, FAMILIES)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([0, 1, 64, 128]),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.sampled_from(["x", *V3]), values, max_size=3),
    max_leaves=6,
)


@given(st.data())
def test_any_damage_to_a_given_file_gives_an_answer_or_one_line(data: st.DataObject) -> None:
    content = config(data.draw(st.sampled_from(sorted(MLA_FILES.keys() | NOT_MLA_FILES.keys()))))
    parts = [content, *(part for part in content.values() if isinstance(part, dict))]
    for _ in range(data.draw(st.integers(1, 4))):
        part = data.draw(st.sampled_from(parts))
        part[data.draw(st.sampled_from(sorted({*part, *V3, "use_mla", "text_config"})))] = data.draw(JSON_VALUES)
    try:
        shown = json.dumps(read_config(content, FAMILIES).to_dict())
    except ConfigError as error:
        shown = str(error)
    assert "\n" not in shown


def test_a_folder_without_a_config_names_the_file_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read: No such file"):
        read_config(tmp_path, FAMILIES)


# ---- names ----


@pytest.mark.parametrize("family", WITH_DIMS)
def test_every_family_is_found_by_its_names(family: str) -> None:
    for name in (family, family.upper(), *FAMILIES[family].get("checkpoints", ())):
        assert find_model(name, FAMILIES) == family
        assert find_model(f"some-org/{name}/", FAMILIES) == family


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("mistralai/Mistral-Small-4-119B-2603", "mistral_small_4"),
        ("MISTRAL4", "mistral_small_4"),
        ("glm_moe_dsa", "glm_5"),
        ("bailing_hybrid", "ling_2_5"),  # shared, with the same dims
        ("deepseek-v3.2-exp", "deepseek_v3_2"),
        ("gpt-oss-20b", "gpt_oss"),
    ],
)
def test_a_model_is_found_by_the_name_people_use(name: str, family: str) -> None:
    assert find_model(name, FAMILIES) == family


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Mistral-Smal-4", "nearest: mistral_small_4"),
        ("deepsek_v3", "nearest: deepseek_v3"),
        ("deepseek_vl_v2", "means several families; name one: deepseek_ocr, deepseek_vl2"),
        ("zzzzzzzzzz", "give its config.json instead"),
        ("", 'no model ""'),
    ],
)
def test_an_unknown_model_names_the_nearest(name: str, message: str) -> None:
    with pytest.raises(UnknownModelError) as caught:
        find_model(name, FAMILIES)
    assert message in str(caught.value)


# ---- the sheet itself ----


def test_the_sheet_matches_its_schema() -> None:
    schema = json.loads((CAPABILITIES / "schema" / "models.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft7Validator.check_schema(schema)
    assert [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(SHEET)] == []


def test_no_two_families_claim_the_same_files() -> None:
    claimed: dict[tuple[str | None, str | None], str] = {}
    for family, rules in FAMILIES.items():
        for model_type in rules.get("model_type", [None]):
            for architecture in rules.get("architectures", [None]):
                if (model_type, architecture) != (None, None):
                    assert claimed.setdefault((model_type, architecture), family) == family


def test_every_name_means_one_family() -> None:
    seen: dict[str, str] = {}
    for family, rules in FAMILIES.items():
        for name in rules.get("checkpoints", ()):
            assert seen.setdefault(name.lower(), family) == family


@pytest.mark.parametrize("family", [family for family, rules in FAMILIES.items() if "like" in rules])
def test_a_shared_layout_is_one_step_away(family: str) -> None:
    assert "like" not in FAMILIES[FAMILIES[family]["like"]]


def test_every_model_has_a_block_in_the_matrix() -> None:
    matrix = yaml.safe_load((CAPABILITIES / "data" / "matrix.yaml").read_text(encoding="utf-8"))["matrix"]
    blocks = {tuple(block["dims"][width] for width in ("qk_nope", "qk_rope", "v_head")) for block in matrix.values()}
    wanted = {tuple(rules["dims"]) for rules in WITH_DIMS.values()}
    wanted |= {tuple(rules["second_geometry"]["dims"]) for rules in WITH_DIMS.values() if "second_geometry" in rules}
    assert wanted <= blocks
