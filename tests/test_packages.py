"""What the data says about packages names only what the sheets know, and says where it was read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from mla_prefill import Matrix
from mla_prefill.backends import packages
from mla_prefill.capabilities.versions import canonical, contains

DATA = packages.read()


def with_sources(data: Any) -> Iterator[dict[str, Any]]:
    if isinstance(data, dict):
        if "sources" in data:
            yield data
        else:
            for part in data.values():
                yield from with_sources(part)
    elif isinstance(data, list):
        for part in data:
            yield from with_sources(part)


def test_every_entry_has_a_source() -> None:
    entries = list(with_sources(DATA))
    assert len(entries) == len(DATA["machine_code"]) + len(DATA["rules"]) + 2
    for source in (source for entry in entries for source in entry["sources"]):
        assert source["kind"] in ("code", "docs")
        assert source["ref"]


@pytest.mark.parametrize(
    "row", [*DATA["machine_code"], *DATA["rules"]], ids=lambda r: f"{r['distribution']}-{r['kernel']}"
)
def test_a_package_that_is_asked_is_a_provider_of_that_kernel(row: dict[str, Any], matrix: Matrix) -> None:
    assert row["distribution"] in {canonical(p.distribution) for p in matrix.kernels[row["kernel"]].providers}
    assert set(row.get("arch", ())) <= set(matrix.kernels[row["kernel"]].arch)


def test_architectures_are_declared(matrix: Matrix) -> None:
    assert set(DATA["runs_only_its_own_machine_code"]["arch"]) <= set(matrix.architectures)


@pytest.mark.parametrize(("member", "kernels"), DATA["vllm"]["runs"].items())
def test_a_member_of_vllm_runs_kernels_of_its_own_backend(member: str, kernels: list[str], matrix: Matrix) -> None:
    assert {matrix.kernels[kernel].backend for kernel in kernels} == {member}


def test_the_tested_versions_are_a_range() -> None:
    assert contains(DATA["vllm"]["tested"], "0.33.0")
    assert not contains(DATA["vllm"]["tested"], "0.40.0")
