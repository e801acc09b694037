"""Selection as a pure function of described environments (C60: every arch is testable without a GPU).

A test named after a case (C01 ...) holds the right outcome of that public report.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from mla_prefill import (
    BatchShape,
    Decision,
    Environment,
    EnvironmentVariableError,
    Matrix,
    MLADimensions,
    NoBackendError,
    Overrides,
    Request,
    RequestError,
    UnknownNameError,
    clear,
    load_matrix,
    select,
)
from mla_prefill.capabilities.load import DATA_DIR
from mla_prefill.selector import engine
from mla_prefill.selector.engine import decide
from mla_prefill.selector.reasons import MEANINGS, REASONS

DEEPSEEK, GLM, MISTRAL, MINICPM = (128, 64, 128), (192, 64, 256), (64, 64, 128), (64, 32, 64)
MATRIX = load_matrix()


def ask(arch: str, dims: Any, installed: dict[str, str] | None = None, **request: Any) -> Decision:
    """The decision for a described machine, chosen or not."""
    return decide(Request(dims, **request), Environment(arch, installed), MATRIX)


def codes(decision: Decision, kernel: str) -> list[str]:
    [verdict] = [v for v in decision.verdicts if v.candidate.kernel == kernel]
    return [r.code for r in verdict.reasons]


def message(decision: Decision, kernel: str) -> str:
    [verdict] = [v for v in decision.verdicts if v.candidate.kernel == kernel]
    return "\n".join(r.message for r in verdict.reasons)


def kernel(decision: Decision) -> str | None:
    return decision.chosen.kernel if decision.chosen else None


# ---- what must hold at the base -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [DEEPSEEK, GLM, MISTRAL])
@pytest.mark.parametrize("fa_version", [None, 2, 3])
def test_c01_hopper_takes_flash_attn_for_all_three(dims: Any, fa_version: int | None) -> None:
    chosen = ask("sm90", dims, fa_version=fa_version).chosen
    assert chosen is not None
    assert chosen.backend == "FLASH_ATTN"
    assert fa_version in (None, chosen.fa_version)
    if dims == MISTRAL:
        assert chosen.pad_v_to is None  # equal widths: never padded


@pytest.mark.parametrize("dims", [DEEPSEEK, MISTRAL])
def test_c01_fa4_without_a_condition_in_the_matrix(dims: Any) -> None:
    chosen = ask("sm90", dims, fa_version=4).chosen
    assert chosen is not None
    assert chosen.kernel == "fa4"
    assert chosen.requires == ("flash-attn-4>=4.0.0b5",)  # the kernel's own floor alone


def test_c03_equal_192_on_datacenter_blackwell() -> None:
    decision = ask("sm100", (128, 64, 192))
    assert kernel(decision) == "fa2"
    assert "dims-unsupported" in codes(decision, "fa4")
    assert "(qk 192, v 192)" in message(decision, "fa4")
    assert "192" in message(decision, "fa4").split("got")[0]


@pytest.mark.parametrize(
    ("arch", "fa_version", "pad_v_to"),
    [("sm90", 4, None), ("sm100", 4, None), ("sm90", 3, 96), ("sm80", 2, 96), ("sm90", 2, 96)],
)
def test_c05_narrow_heads(arch: str, fa_version: int, pad_v_to: int | None) -> None:
    chosen = ask(arch, MINICPM, fa_version=fa_version).chosen
    assert chosen is not None
    assert (chosen.fa_version, chosen.pad_v_to) == (fa_version, pad_v_to)


@pytest.mark.parametrize("name", ["trtllm_ragged", "flashinfer_cutlass", "tokenspeed_mla"])
def test_c05_the_others_refuse_narrow_heads_for_their_dims(name: str) -> None:
    assert "dims-unsupported" in codes(ask("sm100", MINICPM), name)


# ---- asked explicitly, answered explicitly ------------------------------------------------------------------------


def test_c08_off_the_preference_list_is_not_a_gate() -> None:
    """(a) automatic choice leaves it out, (b) an explicit request takes it, (c) unless a capability rule fails."""
    assert kernel(ask("sm110", DEEPSEEK)) == "fa2"
    assert kernel(ask("sm110", DEEPSEEK, fa_version=4)) == "fa4"
    refused = ask("sm100", (128, 64, 192), fa_version=4)
    assert refused.chosen is None
    assert "dims-unsupported" in codes(refused, "fa4")


def test_c09_a_bounded_version_and_every_reason_when_all_refuse(tmp_path: Path) -> None:
    overlay = tmp_path / "bounded.yaml"
    overlay.write_text(
        "schema_version: 1\nmatrix:\n  old:\n    dims: {qk_nope: 160, qk_rope: 64, v_head: 224}\n"
        '    sources: [{kind: issue, ref: "vllm-project/vllm#16206"}]\n    allow:\n'
        '      - {arch: [sm80], fa_version: 2, backends: [FLASH_ATTN], requires: ["flash-attn>=2.6,<2.7.4"]}\n'
    )
    matrix = load_matrix(extra=[overlay])
    request = Request((160, 64, 224))
    assert select(request, Environment("sm80", {"flash-attn": "2.7.3"}), matrix).chosen.kernel == "fa2"  # type: ignore[union-attr]
    with pytest.raises(NoBackendError) as raised:
        select(request, Environment("sm80", {"flash-attn": "2.8.3"}), matrix)
    text = str(raised.value)
    assert all(f"  {name}: " in text for name in matrix.kernels)
    assert "FA2 needs flash-attn" in text
    assert "installed is 2.8.3" in text


@pytest.mark.parametrize("arch", ["sm120", "sm121"])
def test_c10_datacenter_kernels_stay_off_workstation_blackwell(arch: str) -> None:
    decision = ask(arch, DEEPSEEK)
    assert kernel(decision) == "fa2"
    assert codes(decision, "trtllm_ragged") == ["arch-unsupported"]
    assert "sm100, sm103" in message(decision, "trtllm_ragged")


@pytest.mark.parametrize("spelling", ["sm_103", "sm_103a", "sm_103f", "10.3"])
def test_c11_every_spelling_of_103(spelling: str) -> None:
    decision = ask(spelling, DEEPSEEK)
    assert decision.arch == "sm103"
    assert kernel(decision) == "fa4"


def test_c12_held_back_by_policy_is_not_unsupported() -> None:
    automatic = ask("sm110", DEEPSEEK)
    assert kernel(automatic) == "fa2"
    assert codes(automatic, "fa4") == ["not-requested"]
    assert "policy: not validated" in message(automatic, "fa4")
    assert kernel(ask("sm110", DEEPSEEK, fa_version=4)) == "fa4"
    assert ask("sm110", GLM, fa_version=4).chosen is None
    fp8 = ask("sm110", DEEPSEEK, dtype="fp8")
    assert "dtype-unsupported" in codes(fp8, "fa4")


@pytest.mark.parametrize("arch", ["sm120", "sm121"])
def test_c14_every_suggestion_was_tried(arch: str) -> None:
    decision = ask(arch, DEEPSEEK, installed={}, backend="TRTLLM_RAGGED")
    assert decision.chosen is None
    assert decision.hints
    for hint in decision.hints:
        assert "cutlass" not in hint.text
        again = decide(hint.request, hint.environment, MATRIX)
        assert hint.candidate in [v.candidate.kernel for v in again.verdicts if v.verdict in ("chosen", "eligible")]


@pytest.mark.parametrize(
    ("arch", "installed", "asked", "hints"),
    [
        ("sm90", {}, {"backend": "torch_efficient"}, ["install torch>=2.6 for TORCH_SDPA/torch_efficient"]),
        ("sm100", {"flash-attn": "2.6.3"}, {"backend": "fa2"}, ["install flash-attn>=2.7.3 for FLASH_ATTN/fa2"]),
        # One change is told once, for the best kernel that it helps.
        (
            "sm90",
            None,
            {"dtype": "fp8"},
            ["use dtype bfloat16: FLASH_ATTN/fa4", "ask for TORCH_SDPA/torch_math and use"],
        ),
    ],
)
def test_hints_begin_with_what_was_asked_for(
    arch: str, installed: dict[str, str] | None, asked: dict[str, Any], hints: list[str]
) -> None:
    decision = ask(arch, DEEPSEEK, installed=installed, **asked)
    assert decision.chosen is None
    for hint, expected in zip(decision.hints, hints, strict=False):
        assert hint.text.startswith(expected)


def test_an_architecture_that_nobody_declared_is_told_with_the_nearest() -> None:
    with pytest.raises(NoBackendError, match=r"note: unknown architecture 'smm90'; did you mean .*sm90"):
        select(Request(DEEPSEEK), Environment("smm90"))


def test_the_error_of_a_forced_backend_is_about_it() -> None:
    with pytest.raises(NoBackendError) as raised:
        select(Request(DEEPSEEK, backend="torch_efficient"), Environment("sm90", {}))
    lines = str(raised.value).splitlines()
    assert lines[2] == "  torch_efficient: torch_efficient is not installed; it comes with torch>=2.6"
    assert lines[3].startswith("  not-requested (the request is for torch_efficient): fa4, fa3, fa2")
    assert lines[4].startswith("  try: install torch>=2.6")


def test_c19_amd_feature_suffixes() -> None:
    decision = ask("gfx942:sramecc+:xnack-", DEEPSEEK)
    assert decision.arch == "gfx942"
    assert kernel(decision) == "aiter"


@pytest.mark.parametrize("arch", ["npu", "ascend910b", "sm130"])
def test_c22_hardware_nobody_declared(arch: str) -> None:
    """A vendor or arch without entries: every kernel says so, nothing is built, nothing crashes."""
    decision = ask(arch, DEEPSEEK, installed={"torch": "2.11.0"})
    assert decision.chosen is None
    assert all(codes(decision, name) == ["arch-unsupported"] for name in MATRIX.kernels)
    with pytest.raises(NoBackendError, match=arch):
        select(Request(DEEPSEEK), Environment(arch, {}), MATRIX)


@pytest.mark.parametrize("fa_version", [0, 1, 5, 30])
def test_c28_a_version_nobody_has_is_refused(fa_version: int) -> None:
    with pytest.raises(UnknownNameError, match=r"known: 2, 3, 4"):
        ask("sm90", DEEPSEEK, fa_version=fa_version)


@pytest.mark.parametrize("fa_version", [2, 4])
def test_c28_a_pinned_version_that_is_not_at_hand_is_never_replaced(fa_version: int) -> None:
    only_fa3 = {"fa3-fwd": "0.0.3"}
    decision = ask("sm90", DEEPSEEK, only_fa3, fa_version=fa_version)
    assert decision.chosen is None
    assert codes(decision, "fa3") == ["not-requested"]
    assert codes(decision, f"fa{fa_version}") == ["kernel-not-installed"]
    chosen = ask("sm90", DEEPSEEK, only_fa3, fa_version=3).chosen
    assert chosen is not None
    assert chosen.fa_version == 3


def test_c29_each_reason_names_its_own_version() -> None:
    ampere = ask("sm86", DEEPSEEK)
    assert kernel(ampere) == "fa2"
    assert message(ampere, "fa3").startswith("FA3")
    turing = ask("sm75", DEEPSEEK)
    for name, subject in (("fa2", "FA2"), ("fa3", "FA3"), ("fa4", "FA4")):
        assert codes(turing, name)[0] == "arch-unsupported"
        assert message(turing, name).startswith(f"{subject} runs on")


def test_c27_only_prefill_is_answered() -> None:
    with pytest.raises(RequestError, match="prefill only"):
        Request(DEEPSEEK, phase="decode")


@pytest.mark.parametrize("backend", MATRIX.backends)
@pytest.mark.parametrize("arch", MATRIX.architectures)
def test_a_forced_backend_is_used_or_refused(arch: str, backend: str) -> None:
    decision = ask(arch, DEEPSEEK, backend=backend)
    if decision.chosen is not None:
        assert decision.chosen.backend == backend
    else:
        assert all(v.reasons for v in decision.verdicts)
    assert [(c.name, c.value, c.origin) for c in decision.constraints] == [("backend", backend, "argument")]


# ---- overrides ----------------------------------------------------------------------------------------------------


def with_overrides(**given: Any) -> Environment:
    return Environment("sm90", None, None, Overrides(**given))


def test_overrides_force_pin_and_disable() -> None:
    assert kernel(decide(Request(DEEPSEEK), with_overrides(backend="TORCH_SDPA"), MATRIX)) == "torch_efficient"
    assert kernel(decide(Request(DEEPSEEK), with_overrides(fa_version=2), MATRIX)) == "fa2"
    disabled = decide(Request(DEEPSEEK), with_overrides(disable=("FLASH_ATTN", "flashinfer_fa3")), MATRIX)
    assert kernel(disabled) == "cudnn"
    assert codes(disabled, "fa3") == ["disabled-by-user"]


def test_an_argument_beats_the_environment_and_the_decision_says_so() -> None:
    decision = decide(Request(DEEPSEEK, fa_version=3), with_overrides(backend="TORCH_SDPA"), MATRIX)
    assert kernel(decision) == "fa3"
    assert [(c.name, c.origin) for c in decision.constraints] == [("fa_version", "argument")]
    decision = decide(Request(DEEPSEEK), with_overrides(backend="TORCH_SDPA"), MATRIX)
    assert decision.constraints[0].origin == "environment variable MLA_PREFILL_BACKEND"


def test_a_variable_for_the_other_thing_still_holds_beside_an_argument() -> None:
    """Pinned is used or refused: FLASH_ATTN from the engine and FA2 from the environment are both kept."""
    decision = decide(Request(DEEPSEEK, backend="FLASH_ATTN"), with_overrides(fa_version=2), MATRIX)
    assert kernel(decision) == "fa2"
    assert [c.origin for c in decision.constraints] == ["argument", "environment variable MLA_PREFILL_FA_VERSION"]
    decision = decide(Request(DEEPSEEK, backend="CUDNN"), with_overrides(fa_version=2), MATRIX)
    assert kernel(decision) == "cudnn"
    assert decision.notes == ("MLA_PREFILL_FA_VERSION=2 is not used: the request asks for backend CUDNN",)


@pytest.mark.parametrize(
    ("arch", "request_", "requirement"),
    [
        ("sm100", Request(GLM, fa_version=4), "flash-attn-4>=4.0.0b11"),
        ("sm100", Request(GLM, fa_version=4, needs=["context_chunk"]), "flash-attn-4>=4.0.0b36"),
        ("sm90", Request(DEEPSEEK, fa_version=4, needs=["context_chunk"]), "flash-attn-4>=4.0.0b10"),
        ("sm100", Request(DEEPSEEK, backend="TRTLLM_RAGGED", needs=["context_chunk"]), "flashinfer-python>=0.6.18"),
    ],
)
def test_what_is_required_is_never_known_bad(arch: str, request_: Request, requirement: str) -> None:
    chosen = decide(request_, Environment(arch), MATRIX).chosen
    assert chosen is not None
    assert chosen.requires == (requirement,)
    name, _, version = requirement.partition(">=")
    assert decide(request_, Environment(arch, {name: version}), MATRIX).chosen is not None


def test_forcing_what_is_disabled_is_refused() -> None:
    decision = decide(Request(DEEPSEEK, fa_version=3), with_overrides(disable=("fa3",)), MATRIX)
    assert decision.chosen is None
    assert codes(decision, "fa3") == ["disabled-by-user"]
    assert any("MLA_PREFILL_DISABLE" in hint.text for hint in decision.hints)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("MLA_PREFILL_BACKND", "FLASH_ATTN", "did you mean MLA_PREFILL_BACKEND?"),
        ("MLA_PREFILL_FA_VERSION", "three", "must be a number"),
        ("MLA_PREFILL_VERBOSE", "1", "unknown environment variable"),
    ],
)
def test_c26_a_variable_nobody_reads_is_an_error(name: str, value: str, says: str) -> None:
    with pytest.raises(EnvironmentVariableError, match=re.escape(says)):
        Overrides.from_environ({name: value, "PATH": "/bin"})


@pytest.mark.parametrize("given", [{"backend": "FLASHATTN"}, {"disable": ("fa_3",)}, {"fa_version": 9}])
def test_a_bad_value_of_an_override_names_its_variable(given: dict[str, Any]) -> None:
    with pytest.raises(UnknownNameError, match="environment variable MLA_PREFILL_"):
        decide(Request(DEEPSEEK), with_overrides(**given), MATRIX)


def test_c52_an_override_set_after_the_first_answer_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Environment, "detect", classmethod(lambda cls, *_: cls("sm90", None, None, Overrides.from_environ()))
    )
    clear()
    assert kernel(select(Request(DEEPSEEK))) == "fa4"
    monkeypatch.setenv("MLA_PREFILL_FA_VERSION", "3")
    assert kernel(select(Request(DEEPSEEK))) == "fa3"
    monkeypatch.setenv("MLA_PREFILL_DISABLE", "fa3")
    with pytest.raises(NoBackendError):
        select(Request(DEEPSEEK))
    monkeypatch.delenv("MLA_PREFILL_DISABLE")
    monkeypatch.delenv("MLA_PREFILL_FA_VERSION")
    assert kernel(select(Request(DEEPSEEK))) == "fa4"


def test_c54_alternating_questions_both_stay_cached() -> None:
    clear()
    environment = Environment("sm90")
    first, second = (select(Request(dims), environment, MATRIX) for dims in (DEEPSEEK, MINICPM))
    for _ in range(100):
        assert select(Request(DEEPSEEK), environment, MATRIX) is first
        assert select(Request(MINICPM), environment, MATRIX) is second
    for width in range(8, 8 * (engine.CACHE_SIZE + 50), 8):
        with contextlib.suppress(NoBackendError):
            select(Request((width % 4096 + 1, 0, width // 4096 + 1)), environment, MATRIX)
    assert len(MATRIX.answers) <= engine.CACHE_SIZE


def test_cache_keys_hold_the_matrix(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for path in DATA_DIR.glob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        (folder / path.name).write_text(text.replace("fa_version: [2, 3, 4]", "fa_version: [2, 3]"), encoding="utf-8")
    other = load_matrix(folder)
    environment = Environment("sm90")
    assert kernel(select(Request(DEEPSEEK), environment, MATRIX)) == "fa4"
    assert kernel(select(Request(DEEPSEEK), environment, other)) == "fa3"


# ---- packages -----------------------------------------------------------------------------------------------------


def test_c45_flash_attn_2_8_3_is_no_fa4() -> None:
    decision = ask("sm100", DEEPSEEK, {"flash-attn": "2.8.3", "nvidia-cutlass-dsl": "4.6.0"})
    assert kernel(decision) == "fa2"
    assert codes(decision, "fa4") == ["kernel-not-installed"]


def test_c46_newer_than_checked_is_a_warning_not_a_refusal() -> None:
    decision = ask("sm90", DEEPSEEK, {"flash-attn": "2.9.1"})
    chosen = next(v for v in decision.verdicts if v.verdict == "chosen")
    assert chosen.candidate.kernel == "fa2"
    assert "unverified version: flash-attn 2.9.1" in chosen.notes[0]
    assert decision.warnings == tuple(decision.to_dict()["warnings"]) == chosen.notes
    assert "warning: unverified" in decision.explain()
    known = ask("sm90", DEEPSEEK, {"flash-attn": "2.8.3"})
    assert next(v for v in known.verdicts if v.verdict == "chosen").notes == ()


@pytest.mark.parametrize(
    "text", ["ImportError: undefined symbol: _ZN3c10", "OSError: libcudart.so.12", "NameError: name 'cute'"]
)
def test_c35_c47_a_broken_install_keeps_its_text_and_the_others(text: str) -> None:
    environment = Environment("sm90", {"flash-attn-4": "4.0.0b36", "torch": "2.11.0"}, {"flash-attn-4": text})
    decision = decide(Request(DEEPSEEK), environment, MATRIX)
    assert kernel(decision) == "fa2"
    assert codes(decision, "fa4") == ["kernel-import-failed"]
    assert text in message(decision, "fa4")
    assert any("reinstall flash-attn-4" in hint.text for hint in decision.hints)


def test_c49_the_local_part_of_a_version_names_a_flavour() -> None:
    plain, flavoured = (ask("sm90", DEEPSEEK, {"flash-attn": v}) for v in ("2.8.3", "2.8.3+cu12torch2.8"))
    assert kernel(plain) == kernel(flavoured) == "fa2"


def test_c50_availability_is_decided_over_all_providers() -> None:
    """flash-attn is absent, but torch and vLLM offer FA2 too."""
    for name, version in (("torch", "2.11.0"), ("vllm", "0.33.0")):
        chosen = ask("sm90", DEEPSEEK, {name: version}, fa_version=2).chosen
        assert chosen is not None
        assert chosen.provider == name
    nothing = ask("sm90", DEEPSEEK, {}, fa_version=2)
    assert codes(nothing, "fa2") == ["kernel-not-installed"]
    assert all(name in message(nothing, "fa2") for name in ("flash-attn", "torch", "vllm"))


def test_a_build_that_lacks_a_dtype_is_passed_over() -> None:
    """fa3-fwd is built without fp16; vLLM's copy has it."""
    decision = ask("sm90", DEEPSEEK, {"fa3-fwd": "0.0.3"}, dtype="float16", fa_version=3)
    assert codes(decision, "fa3") == ["dtype-unsupported"]
    assert "fa3-fwd" in message(decision, "fa3")
    assert any("vllm" in hint.text for hint in decision.hints)


@pytest.mark.parametrize(("version", "codes_of_fa4"), [("4.0.0b10", ["version-out-of-range"]), ("4.0.0b36", [])])
def test_a_version_floor_is_a_reason_with_the_needed_version(version: str, codes_of_fa4: list[str]) -> None:
    decision = ask("sm100", GLM, {"flash-attn-4": version}, fa_version=4)
    assert codes(decision, "fa4") == codes_of_fa4
    if codes_of_fa4:
        assert "4.0.0b11" in message(decision, "fa4")


def test_an_unreadable_version_is_a_reason_not_a_crash() -> None:
    decision = ask("sm90", DEEPSEEK, {"flash-attn-4": "unreadable"}, fa_version=4)
    assert codes(decision, "fa4") == ["version-out-of-range"]


def test_padded_v_cannot_be_written_in_place() -> None:
    """A kernel given a padded V writes wider rows, never the caller's buffer."""
    assert kernel(ask("sm90", MISTRAL, fa_version=3, needs=["out"])) == "fa3"
    refused = ask("sm90", MINICPM, fa_version=3, needs=["out"])
    assert codes(refused, "fa3") == ["feature-missing"]


# ---- reasons ------------------------------------------------------------------------------------------------------

ARCHES = sorted(MATRIX.architectures)
VERSIONS = {
    "flash-attn": ["2.5.0", "2.8.3", "3.0"],
    "flash-attn-4": ["4.0.0b1", "4.0.0b10", "4.0.0b36"],
    "fa3-fwd": ["0.0.3"],
    "torch": ["2.4.0", "2.11.0"],
    "vllm": ["0.33.0"],
    "flashinfer-python": ["0.2.0", "0.7.4"],
    "tokenspeed-mla": ["2.0.4"],
    "amd-aiter": ["0.1.7"],
}
ENVIRONMENTS = st.builds(
    lambda arch, installed, disable, broken: Environment(
        arch, installed, dict.fromkeys(broken, "ImportError: no"), Overrides(disable=tuple(disable))
    ),
    st.sampled_from([*ARCHES, "sm130"]),
    st.none() | st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in VERSIONS.items()}),
    st.lists(st.sampled_from([*MATRIX.backends, *MATRIX.kernels]), max_size=2, unique=True),
    st.lists(st.sampled_from(sorted(VERSIONS)), max_size=2, unique=True),
)
REQUESTS = st.builds(
    Request,
    st.sampled_from([tuple(b.dims) for b in MATRIX.blocks.values()] + [(96, 32, 96), (100, 4, 60), (320, 64, 320)]),
    st.sampled_from(["bfloat16", "float16", "float32", "fp8"]),
    needs=st.lists(st.sampled_from(sorted(MATRIX.features)), max_size=2, unique=True),
    policy=st.just("default"),
    shape=st.none(),
    fa_version=st.none(),
    backend=st.none() | st.sampled_from([*MATRIX.backends, *MATRIX.kernels]),
    prefers=st.lists(st.sampled_from(sorted(MATRIX.features)), max_size=2, unique=True),
)


@settings(max_examples=150, deadline=None)
@given(REQUESTS, ENVIRONMENTS)
def test_no_reasons_is_supported_and_every_rejection_has_one(request_: Request, environment: Environment) -> None:
    decision = decide(request_, environment, MATRIX)
    assert sorted(v.candidate.kernel for v in decision.verdicts) == sorted(MATRIX.kernels)
    for verdict in decision.verdicts:
        found = [r.code for r in verdict.reasons]
        assert len(found) == len(set(found)) or "known-bad" in found or len(environment.packages or ()) > 1
        if verdict.verdict == "chosen":
            assert not found
            assert verdict.candidate == decision.chosen
        elif verdict.verdict == "eligible":
            assert found == ["lower-priority"]
        else:
            assert found
            assert "lower-priority" not in found
        assert [list(REASONS).index(c) for c in found] == sorted(list(REASONS).index(c) for c in found) or len(
            found
        ) > 1
        assert all(r.message and "{" not in r.message.replace("{}", "") for r in verdict.reasons)
    if decision.chosen:
        allowed = MATRIX.lookup(decision.arch, decision.chosen.fa_version, request_.dims)
        assert decision.chosen.kernel in [c.kernel for c in allowed]
    assert decision.to_dict()["arch"] == decision.arch
    assert decision.explain()
    assert decision.one_line()


@settings(max_examples=100, deadline=None)
@given(REQUESTS, ENVIRONMENTS)
def test_a_wish_is_met_where_the_same_need_has_an_answer(request_: Request, environment: Environment) -> None:
    """And where it is not, nothing changes: who is eligible never does, and unmet wishes choose nobody."""

    def asked(needs: tuple[str, ...], prefers: tuple[str, ...] = ()) -> Decision:
        return decide(Request(**{**request_._asdict(), "needs": needs, "prefers": prefers}), environment, MATRIX)

    wished, plain = decide(request_, environment, MATRIX), asked(request_.needs)
    eligible = [{v.candidate.kernel for v in d.verdicts if v.verdict != "rejected"} for d in (wished, plain)]
    assert eligible[0] == eligible[1]
    needs = request_.needs
    for wish in request_.prefers if plain.chosen else ():
        if wish not in wished.unmet:
            needs = (*needs, wish)
        else:
            assert asked((*needs, wish)).chosen is None
    best = asked(needs).chosen
    assert (wished.chosen and wished.chosen.kernel) == (best and best.kernel)
    assert sum(" is preferred, but " in warning for warning in wished.warnings) == len(wished.unmet)


@settings(max_examples=60, deadline=None)
@given(REQUESTS, ENVIRONMENTS)
def test_every_hint_applied_makes_its_candidate_eligible(request_: Request, environment: Environment) -> None:
    for hint in decide(request_, environment, MATRIX).hints:
        again = decide(hint.request, hint.environment, MATRIX)
        eligible = [v.candidate.kernel for v in again.verdicts if v.verdict in ("chosen", "eligible")]
        assert hint.candidate in eligible or (hint.candidate in MATRIX.blocks and again.chosen)


def test_no_backend_names_the_nearest_dims() -> None:
    with pytest.raises(NoBackendError, match=r"nearest dims .* \(128, 64, 128\)") as raised:
        select(Request((128, 64, 120)), Environment("sm90"), MATRIX)
    assert raised.value.decision.chosen is None


def test_every_reason_code_has_a_text_and_a_meaning() -> None:
    assert list(REASONS)
    assert set(REASONS) == set(MEANINGS)


def test_the_decision_for_a_machine_keeps_every_constraint() -> None:
    decision = ask("sm90", DEEPSEEK, {"flash-attn-4": "4.0.0b36"}, needs=["lse", "context_chunk"])
    assert "flash-attn-4 4.0.0b36" in decision.one_line()
    data = decision.to_dict()
    assert data["chosen"] == {
        "backend": "FLASH_ATTN",
        "kernel": "fa4",
        "fa_version": 4,
        "pad_v_to": None,
        "provider": "flash-attn-4",
        "requires": ["flash-attn-4>=4.0.0b10"],
    }
    assert data["request"] == {
        "dims": [128, 64, 128],
        "dtype": "bfloat16",
        "fa_version": None,
        "backend": None,
        "needs": ["context_chunk", "lse"],
        "policy": "default",
    }


# ---- requests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"dims": (64, 64)}, "three numbers"),
        ({"dims": None}, "three numbers qk_nope, qk_rope, v_head; got None"),
        ({"dims": 64}, "three numbers"),
        ({"dims": "abc"}, "three numbers"),
        ({"dims": (64, 64, -128)}, "between 0 and"),
        ({"dims": (64, 64, "128")}, "whole number"),
        ({"dims": DEEPSEEK, "dtype": "bflot16"}, "did you mean bfloat16?"),
        ({"dims": DEEPSEEK, "dtype": "int8"}, "unknown dtype"),
        ({"dims": DEEPSEEK, "policy": "fastest"}, "unknown policy"),
        ({"dims": DEEPSEEK, "needs": "lse"}, "list of features"),
        ({"dims": DEEPSEEK, "needs": None}, "list of features"),
        ({"dims": DEEPSEEK, "needs": [1]}, "list of features"),
        ({"dims": DEEPSEEK, "fa_version": "3"}, "whole number"),
    ],
)
def test_a_request_that_cannot_be_meant(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=re.escape(says)):
        Request(**arguments)


def test_unknown_names_in_a_request_get_the_nearest_one() -> None:
    with pytest.raises(UnknownNameError, match="did you mean FLASH_ATTN"):
        ask("sm90", DEEPSEEK, backend="FLASHATTN")
    with pytest.raises(UnknownNameError, match="did you mean context_chunk"):
        ask("sm90", DEEPSEEK, needs=["context_chunks"])
    with pytest.raises(UnknownNameError, match="one of the two"):
        ask("sm90", DEEPSEEK, backend="FLASHINFER", fa_version=3)


@pytest.mark.parametrize("given", [None, object(), SimpleNamespace(model_config=None, attention_config=None)])
def test_what_is_no_engine_configuration_is_refused_in_one_line(given: Any) -> None:
    with pytest.raises(
        RequestError, match=r"from_vllm takes the vllm\.config\.VllmConfig .*, got [^\n]* has no attribute"
    ):
        Request.from_vllm(given)


def test_values_of_another_kind_are_refused_in_words() -> None:
    with pytest.raises(RequestError, match="takes a Request"):
        select(DEEPSEEK, Environment("sm90"), MATRIX)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="installed maps distributions to versions"):
        Environment("sm90", ["torch"])  # type: ignore[arg-type]


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    one, three, width = (numpy.int64(number) for number in (1, 3, 64))
    asked = Request([width, width, width * 2], fa_version=three, policy="measured", shape=BatchShape(one, width, three))
    same = Request((64, 64, 128), fa_version=3, policy="measured", shape=BatchShape(1, 64, 3))
    assert asked == same
    assert {type(value) for part in (asked.dims, asked.shape, [asked.fa_version]) for value in part[:3]} == {int}
    for wrong in (numpy.float64(64), numpy.bool_(True), numpy.array([64, 64])):
        with pytest.raises(RequestError, match="qk_nope_head_dim must be a whole number"):
            Request((wrong, 64, 128))
        with pytest.raises(RequestError, match="fa_version must be a whole number"):
            Request((64, 64, 128), fa_version=wrong)


def test_a_decision_goes_to_another_process() -> None:
    decision = ask("sm90", DEEPSEEK, {"flash-attn-4": "4.0.0b36"})
    for copied in (pickle.loads(pickle.dumps(decision)), copy.deepcopy(decision)):
        assert copied.chosen == decision.chosen
        assert copied.explain() == decision.explain()


def test_dtypes_in_every_spelling() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch for its dtype objects")
    same = [Request(DEEPSEEK, d) for d in ("bfloat16", "bf16", "torch.bfloat16", torch.bfloat16)]
    assert len(set(same)) == 1


def test_values_are_hashable_and_equal() -> None:
    assert Request(MLADimensions(*DEEPSEEK)) == Request(list(DEEPSEEK))
    assert hash(Environment("sm90", {"a": "1", "b": "2"})) == hash(Environment("sm90", {"b": "2", "a": "1"}))
    assert Environment("sm90", {"Flash_Attn": "2"}).installed == {"flash-attn": "2"}


def test_the_matrix_fixture_is_the_shipped_one(matrix: Matrix) -> None:
    assert matrix.fingerprint == MATRIX.fingerprint
    assert yaml.safe_load((DATA_DIR / "matrix.yaml").read_text())["matrix"].keys() == matrix.blocks.keys()
