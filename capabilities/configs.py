"""From a model's ``config.json`` to the head dims of its MLA prefill, or the reason why it has none.

Reads the raw file: configuration classes fill in defaults and alias fields (huggingface/transformers#46739), the file
does not. The field names that all families share stand here; what one family does differently (names, defaults, where
the fields are, which layers) is data, in ``data/models.yaml``.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mla_prefill.capabilities.findings import read_bytes
from mla_prefill.capabilities.model import MAX_HEAD_DIM, MLADimensions

#: A config.json is a few kilobytes; a larger file is something else, often the weights.
MAX_BYTES = 32 * 1024 * 1024
#: File names looked for in a model's folder, best first.
FILE_NAMES = ("config.json", "params.json")
TOP_LEVEL = "top level"
#: Where a text model that generates is nested: transformers' get_text_config, vLLM and SGLang. A fixed list, since
#: vision and audio parts have head counts of their own.
TEXT_PARTS = (
    ("text_config",),
    ("language_config",),
    ("llm_config",),
    ("decoder",),
    ("generator",),
    ("thinker_config", "text_config"),
)

_DIMS = MLADimensions._fields
_MAX_COUNT = 1 << 20  # heads, layers, hidden sizes: more than any model has
_RANGES = dict.fromkeys(_DIMS, (0, MAX_HEAD_DIM)) | {"kv_lora_rank": (0, _MAX_COUNT)}
_MAX_LISTED = 32  # layer numbers in a note
_SWITCHES = {
    "use_mla": "the file says use_mla: false, so the model runs ordinary multi-head attention",
    "is_causal": "the file says is_causal: false; engines run bidirectional models on the ordinary attention path",
}

Families = Mapping[str, Mapping[str, Any]]
Layers = tuple[int, ...]


class ConfigError(ValueError):
    """The source is no readable config, or holds numbers that no model has. One line."""


class UnknownModelError(ValueError):
    """A name that the model sheet does not have, or that means several families. One line."""


@dataclass(frozen=True, slots=True)
class OtherDims:
    """A second geometry: some layers of the model have these dims. ``layers`` is None where the file does not tell."""

    dims: MLADimensions
    num_attention_heads: int | None
    kv_lora_rank: int | None
    layers: Layers | None

    def to_dict(self) -> dict[str, Any]:
        layers = None if self.layers is None else list(self.layers)
        return {"dims": list(self.dims), "num_attention_heads": self.num_attention_heads, "layers": layers}


@dataclass(frozen=True, slots=True)
class ModelDims:
    """What a config says about its MLA prefill.

    ``layers`` are the decoder layers that have ``dims``, numbered from 0; None means all of them (or that only some
    do and the file does not tell which: then a note says so). ``family`` is a key of the model sheet or None.
    ``location`` is where the text fields were: ``top level``, ``text_config``, ``language_config`` or another part.
    """

    dims: MLADimensions
    kv_lora_rank: int | None
    num_attention_heads: int | None
    location: str
    family: str | None
    layers: Layers | None = None
    other_dims: tuple[OtherDims, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self, block: str | None = None) -> dict[str, Any]:
        """The JSON of `mla-prefill dims`, whose keys are stable; ``block`` is the dims block of the matrix."""
        return {
            "is_mla": True,
            "dims": list(self.dims),
            "kv_lora_rank": self.kv_lora_rank,
            "num_attention_heads": self.num_attention_heads,
            "location": self.location,
            "block": block,
            "other_dims": [other.to_dict() for other in self.other_dims],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class NotMLA:
    """The config describes a model without an MLA prefill."""

    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {"is_mla": False, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Unknown:
    """The config cannot tell: the part or the fields that would decide are not in it."""

    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {"is_mla": None, "reason": self.reason}


Answer = ModelDims | NotMLA | Unknown


def read_config(source: str | os.PathLike[str] | Mapping[str, Any] | Any, families: Families) -> Answer:
    """The MLA dims that a config states.

    Args:
        source: a ``config.json`` or ``params.json``, a folder that holds one, its content as a mapping, or an object
            with ``to_dict()`` such as a transformers config.
        families: the ``models`` mapping of ``models.yaml``.

    Raises:
        ConfigError: not readable, not JSON, not an object, or a field holds what no model has.
    """
    label, top = _load(source)
    location, values = _text_part(top)
    family = _recognise(top, values, families)
    rules = families[family] if family else {}
    text = _Text(label, location, values, rules)

    stated = {name: text.stated(name) for name in (*_DIMS, "kv_lora_rank")}  # nonsense is refused before any verdict
    for switch, reason in _SWITCHES.items():
        if values.get(switch) is False or top.get(switch) is False:
            return NotMLA(reason)
    if rules.get("is_mla") is False:
        return NotMLA(rules["reason"])
    where = rules.get("where", TOP_LEVEL)
    if location == TOP_LEVEL != where and stated["kv_lora_rank"] is None and "kv_lora_rank" not in values:
        return Unknown(f"{label} is a {family} file, whose text model is under {where}; it has no such part")
    rank = text.number("kv_lora_rank")
    if not rank:
        return _without_latent(text, stated, rank)

    numbers = {name: text.number(name) for name in _DIMS}
    if numbers["qk_nope_head_dim"] == 0 == numbers["qk_rope_head_dim"]:
        return NotMLA("qk_nope_head_dim and qk_rope_head_dim are both 0, which selects ordinary attention")
    if missing := [name for name, number in numbers.items() if number is None]:
        return Unknown(f"{label} has kv_lora_rank {rank} but no {' and no '.join(missing)} ({text.location})")
    dims = text.dims(numbers)
    layers, layer_note = text.mla_layers()
    other, other_note = text.second_geometry()
    if layers == () and not other and not other_note:
        return NotMLA("the file names no layer that uses MLA")
    heads = text.number("num_attention_heads")
    found = ModelDims(dims, rank, heads, location, family, layers, (other,) if other else ())
    notes = (*_notes(text, stated, dims), layer_note, other_note, *_sheet_notes(found, families))
    return replace(found, family=_member(found, families), notes=tuple(note for note in notes if note))


def _without_latent(text: _Text, stated: Mapping[str, int | None], rank: int | None) -> NotMLA | Unknown:
    given = [name for name, number in stated.items() if number is not None]
    if rank == 0 or "kv_lora_rank" in text.values:
        return NotMLA(f"kv_lora_rank is {'null' if rank is None else 0}: K and V do not come from a latent")
    if not given and text.stated("num_attention_heads") is None:
        return Unknown(f"{text.label} describes no attention: no head counts, no head dims, no part with a text model")
    also = f" ({', '.join(given)} alone {'does' if len(given) == 1 else 'do'} not make a model MLA)" if given else ""
    return NotMLA(f"the file has no kv_lora_rank: K and V do not come from a latent{also}")


def _notes(text: _Text, stated: Mapping[str, int | None], dims: MLADimensions) -> Iterator[str]:
    filled = [f"{name} {text.number(name)}" for name, number in stated.items() if number is None]
    if filled:
        yield f"not in the file, filled in as the model's own class does: {', '.join(filled)}"
    width = text.values.get("qk_head_dim")
    if width is not None and width != dims.qk_head_dim:
        yield f"qk_head_dim is {_shown(width)} in the file, but qk_nope + qk_rope = {dims.qk_head_dim}"
    for flag, note in text.rules.get("flags", {}).items():
        if text.values.get(flag) is True:
            yield note
    if text.rules.get("sparse") or text.values.get("index_topk"):
        dense = "the model uses sparse attention (DSA); these are the dims of its dense prefill"
        yield f"{dense}, which is what a request asks for; needs=['sparse'] (--needs sparse) asks for the other"


def _sheet_notes(found: ModelDims, families: Families) -> Iterator[str]:
    if found.family is None:
        yield "this kind of model is not in the model sheet; the dims are read from the usual fields"
        return
    known = {tuple(r["dims"]) for r in _relatives(found.family, families).values() if "dims" in r}
    if known and found.dims not in known:
        shown = " or ".join(str(MLADimensions(*dims)) for dims in sorted(known))
        yield f"the public checkpoints of this kind have {shown}"


# ---- reading the file ----


def _load(source: Any) -> tuple[str, Mapping[str, Any]]:
    """The label for messages, and the top-level object."""
    if isinstance(source, Mapping):
        return "config", source
    if isinstance(source, str | os.PathLike):
        return _load_file(Path(source))
    name = type(source).__name__
    if not callable(getattr(source, "to_dict", None)):
        raise ConfigError(f"expected a path, a mapping or an object with to_dict(), got {name}")
    try:
        content = source.to_dict()
    except Exception as error:  # a configuration class may raise anything
        raise ConfigError(f"{name}.to_dict() failed with {type(error).__name__}; pass its config.json") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"{name}.to_dict() gave {_shown(content)}, not a mapping")
    return name, content


def _load_file(path: Path) -> tuple[str, Mapping[str, Any]]:
    try:
        if path.is_dir():
            path = next((path / name for name in FILE_NAMES if (path / name).exists()), path / FILE_NAMES[0])
        raw = read_bytes(path, MAX_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise ConfigError(f"{_label(path)}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    label = _label(path)
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{label}: larger than {MAX_BYTES // 2**20} MiB; is this the config, not the weights?")
    if not raw.strip():
        raise ConfigError(f"{label}: the file is empty")
    try:
        content = json.loads(raw)  # UTF-8, -16 or -32, with or without BOM; of a repeated key the last counts
    except UnicodeDecodeError as error:
        raise ConfigError(f"{label}: not text: byte {error.start} is not {error.encoding}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{label}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except ValueError as error:  # an integer of thousands of digits
        raise ConfigError(f"{label}: not usable: {str(error).split(';')[0]}") from None
    except RecursionError:
        raise ConfigError(f"{label}: nested too deeply for a config") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{label}: holds {_shown(content)}, not an object with fields")
    return label, content


def _label(path: Path) -> str:
    return str(path) if str(path).isprintable() else ascii(str(path))


def _text_part(top: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Where the text model's fields are, and they. A part that is empty or no object is not there."""
    for path in TEXT_PARTS:
        part = _dig(top, path)
        if part and isinstance(part, Mapping):
            return ".".join(path), part
    return TOP_LEVEL, top


def _dig(values: Any, path: Iterable[str]) -> Any:
    for step in path:
        values = values.get(step) if isinstance(values, Mapping) else None
    return values


@dataclass(frozen=True, slots=True)
class _Text:
    """The text part of one config, read under the names that its family uses."""

    label: str
    location: str
    values: Mapping[str, Any]
    rules: Mapping[str, Any]
    prefix: str = ""

    def stated(self, name: str) -> int | None:
        """The number that the file gives for a standard field; None where it is absent or null."""
        own = () if self.prefix else (self.rules.get("fields", {}).get(name),)
        for key in (self.prefix + name, *own):
            if key is not None and (value := self.values.get(key)) is not None:
                return self._whole(key, value, *_RANGES.get(name, (1, _MAX_COUNT)))
        return None

    def number(self, name: str) -> int | None:
        """`stated`, or what the family's own class fills in. An explicit null of kv_lora_rank means none."""
        number = self.stated(name)
        if number is not None or (name == "kv_lora_rank" and name in self.values):
            return number
        rule: int | Mapping[str, Any] | None = self.rules.get("defaults", {}).get(name)
        if not isinstance(rule, Mapping):
            return rule
        dividend, divisor = map(self.number, rule["quotient"])
        return dividend // divisor if dividend and divisor else None

    def dims(self, numbers: Mapping[str, Any]) -> MLADimensions:
        try:
            return MLADimensions(**numbers)
        except ValueError as error:
            raise ConfigError(f"{self._at(self.prefix + _DIMS[-1])}: {error}") from None

    def mla_layers(self) -> tuple[Layers | None, str]:
        """The layers that have the dims, numbered from 0 (None: all), and a note where that is not all."""
        rules = self.rules.get("mla_layers", ())
        count = self.number("num_hidden_layers")
        for rule in rules:
            layers = self._layers(rule, count)
            if layers is not None:
                of = "" if count is None else f" of {count}"
                return layers, f"these dims are on {len(layers)}{of} layers, numbered from 0: {_some(layers)}"
        return None, "only some layers have these dims; the file does not say which" if rules else ""

    def second_geometry(self) -> tuple[OtherDims | None, str]:
        """The dims of layers that have others, and a note where the file names such layers without their dims."""
        rule = self.rules.get("second_geometry")
        if not rule:
            return None, ""
        layers = self._layers(rule["layers"], self.number("num_hidden_layers"))
        other = replace(self, prefix=rule["prefix"])
        numbers = {name: other.stated(name) for name in _DIMS}
        missing = [other.prefix + name for name, number in numbers.items() if number is None]
        if missing:
            return None, f"{len(layers)} layers have other dims, but {missing[0]} is missing" if layers else ""
        heads, rank = other.stated("num_attention_heads"), other.stated("kv_lora_rank")
        return OtherDims(other.dims(numbers), heads, rank, layers), ""

    def _layers(self, rule: Mapping[str, Any], count: int | None) -> Layers | None:
        """The layers that a rule of the model sheet gives for this file; None where the file cannot answer it."""
        if "listed_in" in rule:
            first, key = rule["numbered_from"], rule["listed_in"]
            listed = _dig(self.values, key.split("."))
            if listed is None:
                return None
            last = _MAX_COUNT if count is None else first + count - 1
            items = enumerate(self._list(key, listed))
            return tuple(sorted({self._whole(f"{key}[{i}]", layer, first, last) - first for i, layer in items}))
        if "types_in" in rule:
            types = self.values.get(rule["types_in"])
            if types is None:
                return None
            return tuple(i for i, kind in enumerate(self._list(rule["types_in"], types)) if kind in rule["values"])
        size = rule["last_of_group"]
        if isinstance(size, str):
            value = self.values.get(size)
            size = None if value is None else self._whole(size, value, 1, _MAX_COUNT)
        if size is None or count is None:
            return None
        grouped = count // size * size
        return tuple(i for i in range(count) if (i + 1) % size == 0 or (i >= grouped and rule["remainder"]))

    def _list(self, key: str, value: Any) -> list[Any] | tuple[Any, ...]:
        if isinstance(value, list | tuple):
            return value
        raise ConfigError(f"{self._at(key)} must be a list, got {_shown(value)}")

    def _whole(self, key: str, value: Any, low: int, high: int) -> int:
        if type(value) is int and low <= value <= high:
            return value
        hint = ""
        if isinstance(value, str) and re.fullmatch(r"\d{1,9}", value):
            hint = f"; write {int(value)} without quotes"
        elif isinstance(value, float) and value.is_integer() and low <= value <= high:
            hint = f"; write {int(value)}"
        wanted = f"a whole number from {low} to {high}"
        raise ConfigError(f"{self._at(key)} must be {wanted}, got {_shown(value)}{hint}")

    def _at(self, key: str) -> str:
        return f"{self.label}: {key}" if self.location == TOP_LEVEL else f"{self.label}: {self.location}.{key}"


def _shown(value: Any) -> str:
    """A value in a message: short, on one line, whatever it is."""
    if isinstance(value, Mapping | list | tuple):
        return "an object" if isinstance(value, Mapping) else "a list"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length() * 3 // 10} digits"
    plain = value is None or isinstance(value, bool | str | float)
    text = json.dumps(value) if plain else " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:37]}..."


def _some(layers: Layers) -> str:
    return ", ".join(map(str, layers[:_MAX_LISTED])) + (", ..." if len(layers) > _MAX_LISTED else "")


# ---- the model sheet ----


def _recognise(top: Mapping[str, Any], text: Mapping[str, Any], families: Families) -> str | None:
    """The family that a file belongs to: by its top level, else by its text part; None where the sheet has neither."""
    for values in (top, text):
        claims = {family: _claim(rules, values) for family, rules in families.items()}
        best = max(claims.values(), default=0)
        if best:  # of equal claims (a shared model_type, no architectures) a lookalike's is the weaker one
            equal = [family for family, claim in claims.items() if claim == best]
            return min(equal, key=lambda family: (families[family].get("is_mla") is False, family))
    return None


def _claim(rules: Mapping[str, Any], values: Mapping[str, Any]) -> int:
    """How much of what a file says it is a family claims: 2 for the model_type, 1 for the architecture."""
    model_type, architectures = _strings(values.get("model_type")), _strings(values.get("architectures"))
    if not model_type and not architectures:
        marks = rules.get("recognised_by", ())
        return int(bool(marks) and all(mark in values for mark in marks))
    claims_type = not model_type.isdisjoint(rules.get("model_type", ()))
    return 2 * claims_type + (not architectures.isdisjoint(rules.get("architectures", ())))


def _strings(value: Any) -> set[str]:
    items = value if isinstance(value, list | tuple) else (value,)
    return {item for item in items if isinstance(item, str)}


def _relatives(family: str, families: Families) -> Families:
    """The family and those whose files look the same."""
    return {name: rules for name, rules in families.items() if family in (name, rules.get("like"))}


def _member(found: ModelDims, families: Families) -> str | None:
    """The one relative whose public checkpoint has exactly these numbers, else the family itself."""
    if found.family is None:
        return None
    numbers = (list(found.dims), found.num_attention_heads, found.kv_lora_rank)
    fields = ("dims", "num_attention_heads", "kv_lora_rank")
    relatives = _relatives(found.family, families)
    same = [name for name, rules in relatives.items() if numbers == tuple(map(rules.get, fields))]
    return same[0] if len(same) == 1 else found.family


def find_model(name: str, families: Families) -> str:
    """The family that a name means: a key of the sheet, a checkpoint (with or without organisation) or a model_type.

    Upper and lower case and the punctuation between words do not count. A model_type that several families share is
    accepted where they have the same dims.

    Raises:
        UnknownModelError: no family, or several that differ; the message has the nearest names.
    """
    wanted = _plain(name)
    names: dict[str, str] = {}
    types: dict[str, list[str]] = {}
    for family, rules in families.items():
        names |= {_plain(checkpoint): family for checkpoint in rules.get("checkpoints", ())}
        for model_type in rules.get("model_type", ()):
            types.setdefault(_plain(model_type), []).append(family)
    names |= {_plain(family): family for family in families}
    if wanted in names:
        return names[wanted]
    shared = sorted(types.get(wanted, ()))
    if len({tuple(families[family].get("dims", ())) for family in shared}) == 1:
        return shared[0]
    if shared:
        raise UnknownModelError(f"model_type {_shown(name)} means several families; name one: {', '.join(shared)}")
    close = difflib.get_close_matches(wanted, [*names, *types], n=8, cutoff=0.5)
    nearest = list(dict.fromkeys(names.get(near) or types[near][0] for near in close))[:3]
    hint = f"nearest: {', '.join(nearest)}" if nearest else "give its config.json instead"
    raise UnknownModelError(f"no model {_shown(name)} in the model sheet; {hint}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.rstrip("/").rsplit("/", 1)[-1].lower()).strip("_")
