"""One decision for many ranks: four real processes on gloo, each with the machine that a scenario gives it.

Where there are GPUs, `pytest -m gpu tests/test_group.py` repeats the exchange on NCCL with 1, 2, 4 and 8 of them.

This file is also the program that those processes run: it asks every scenario in turn and writes down what it got.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mla_prefill import (
    Environment,
    GroupDecision,
    GroupError,
    NoBackendError,
    Overrides,
    Request,
    load_matrix,
    select,
    select_for_group,
)
from mla_prefill.selector import group

RANKS = range(4)
#: How a rank tells NCCL its device: torch.cuda.set_device, or device_id of init_process_group.
SET, BOUND = "nccl set", "nccl bound"
MATRIX = load_matrix()
REQUEST = Request((64, 64, 128))
FA2, FA3 = {"flash-attn": "2.8.3"}, {"flash-attn-3": "3.0.0"}
SITE = (
    "schema_version: 1\nmatrix:\n  site_model:\n    dims: {qk_nope: 56, qk_rope: 72, v_head: 128}\n"
    "    sources: [{kind: config, ref: 'site:config.json'}]\n"
    "    allow:\n      - {arch: [sm90], fa_version: 3, backends: [FLASH_ATTN]}\n"
)
ALL = {**FA2, **FA3, "flashinfer-python": "0.7.4"}
CUDNN = {"torch": "2.11.0", "flashinfer-python": "0.7.4", "nvidia-cudnn-frontend": "1.32.0"}


def ask(environment: Environment, request: Request = REQUEST, **more: Any) -> Any:
    return select_for_group(request, environment=environment, **more)


def hopper(*by_rank: dict[str, str]) -> Callable[[int], Any]:
    """A scenario of H200s with these packages; ranks beyond the last one have what it has."""
    return lambda rank: ask(Environment("sm90", by_rank[min(rank, len(by_rank) - 1)]))


def with_a_mistyped_variable(rank: int) -> Any:
    if rank != 3:
        return ask(Environment("sm90", ALL))
    os.environ["MLA_PREFILL_DISABEL"] = "fa3"
    try:
        return select_for_group(REQUEST)
    finally:
        del os.environ["MLA_PREFILL_DISABEL"]


def with_another_matrix(rank: int) -> Any:
    matrix = load_matrix(extra=[os.environ["OVERLAY"]]) if rank == 1 else None
    return ask(Environment("sm90", ALL), matrix=matrix)


def in_a_subgroup(rank: int) -> Any:
    """Ranks 1 and 3 have FA3, the others have not and are not asked."""
    import torch.distributed as dist

    some = dist.new_group([1, 3])
    environment = Environment("sm90", ALL if rank in (1, 3) else FA2)
    return ask(environment, group=some) if rank in (1, 3) else select(REQUEST, environment)


#: name -> what a rank asks. Every one is asked by four processes at once.
SCENARIOS: dict[str, Callable[[int], Any]] = {
    "alike": hopper(ALL),
    "described": lambda rank: ask(Environment("sm90")),
    "sm89 and sm120": lambda rank: ask(Environment("sm120" if rank % 2 else "sm89", FA2)),
    # cudnn is third on both, fa2 fourth on sm100 and first on sm90.
    "sm100 and sm90": lambda rank: ask(Environment("sm90" if rank else "sm100", CUDNN)),
    # Both packages are everywhere, but each runs on one of the two.
    "sm86 and sm87": lambda rank: ask(
        Environment("sm87" if rank else "sm86", {"flash-attn": "2.8.3", "vllm": "0.33.0"})
    ),
    "one rank lacks FA3": hopper(ALL, ALL, ALL, FA2),
    "nothing in common": hopper(FA3, FA3, FA2),
    "two versions": hopper({"flash-attn": "2.8.3"}, {"flash-attn": "2.7.4.post1"}),
    "a common second provider": lambda rank: ask(
        Environment("sm90", {"vllm": "0.33.0", **({"fa3-fwd": "0.0.3"} if rank else FA3)}),
        Request(REQUEST.dims, fa_version=3),
    ),
    "disabled on one rank": lambda rank: ask(
        Environment("sm90", ALL, overrides=Overrides(disable=("fa3",)) if rank == 2 else Overrides())
    ),
    "unknown name on one rank": lambda rank: ask(
        Environment("sm90", ALL, overrides=Overrides(disable=("fa33",)) if rank == 2 else Overrides())
    ),
    "each for itself": lambda rank: ask(Environment("sm90", FA2 if rank == 3 else ALL), per_rank=True),
    "one has nothing": lambda rank: ask(Environment("sm90", {} if rank == 3 else ALL), per_rank=True),
    "no request on one rank": lambda rank: ask(Environment("sm90", ALL), "deepseek_v3" if rank == 1 else REQUEST),
    "no pickle on one rank": lambda rank: ask(Environment("sm90", ALL, device=(lambda: 0) if rank == 1 else None)),
    "other questions": lambda rank: ask(
        Environment("sm90", ALL), Request((64, 64, 128), "fp16" if rank == 2 else "bf16")
    ),
    "other matrices": with_another_matrix,
    "mistyped variable": with_a_mistyped_variable,
    "subgroup": in_a_subgroup,
}


def exchanged(by_rank: Callable[[int, int], dict[str, str]]) -> Callable[[int], Any]:
    """What select_for_group does with more than one rank, for a group of any size, one included."""

    def ask(rank: int) -> Any:
        import torch.distributed as dist

        environment = Environment("sm90", by_rank(rank, dist.get_world_size()))
        mine = group._Statement(REQUEST, environment, "1", MATRIX.fingerprint)
        own = tuple((other, group._decide_on(other, said, MATRIX)) for other, said in group._exchange(mine, None))
        return group._agree(own)

    return ask


#: What a group of any size asks; ranks are counted from 0, the last one is ``size - 1``.
EXCHANGES: dict[str, Callable[[int], Any]] = {
    "alike": exchanged(lambda rank, size: ALL),
    "the last rank lacks FA3": exchanged(lambda rank, size: FA2 if rank == size - 1 else ALL),
    "this machine": lambda rank: select_for_group(REQUEST),
    "this machine, each for itself": lambda rank: select_for_group(REQUEST, per_rank=True),
}


def outcome(ask: Callable[[int], Any], rank: int) -> dict[str, Any]:
    try:
        answer = ask(rank)
    except (NoBackendError, GroupError) as error:
        return {"error": type(error).__name__, "text": str(error)}
    decisions = answer if isinstance(answer, tuple) else [answer]
    return {
        "kernels": [d.chosen and d.chosen.kernel for d in decisions],
        "answer": [d.to_dict() for d in decisions],
        "text": "\n".join([d.explain() + "\n" + d.one_line() for d in decisions]),
    }


def main(backend: str, size: int, rank: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    bound: dict[str, Any] = {}
    if backend == SET:
        torch.cuda.set_device(rank)
    elif backend == BOUND:  # and the current device is 0 on every rank
        bound = {"device_id": torch.device("cuda", rank)}
    store = f"file://{folder}/store"
    dist.init_process_group(backend.split()[0], init_method=store, rank=rank, world_size=size, **bound)
    asked = SCENARIOS if size == len(RANKS) else EXCHANGES
    outcomes = {name: outcome(ask, rank) for name, ask in asked.items()}
    (folder / f"{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


def run(folder: Path, backend: str, size: int, **environ: str) -> list[dict[str, dict[str, Any]]]:
    """What each rank got: scenario -> outcome."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("MLA_PREFILL_")} | environ
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, backend, str(size), str(rank), str(folder)],
            env=environ,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Scenario -> what each of the four ranks got."""
    folder = tmp_path_factory.mktemp("group")
    overlay = folder / "site.yaml"
    overlay.write_text(SITE)
    results = run(folder, "gloo", len(RANKS), OVERLAY=str(overlay))
    return {name: [result[name] for result in results] for name in SCENARIOS}


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "subgroup"])
def test_all_ranks_get_the_same(name: str, outcomes: dict[str, list[dict[str, Any]]]) -> None:
    assert all(got == outcomes[name][0] for got in outcomes[name])


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("alike", ["fa3"]),
        ("sm89 and sm120", ["fa2"]),  # C55
        ("sm100 and sm90", ["cudnn"]),
        ("one rank lacks FA3", ["fa2"]),
        ("a common second provider", ["fa3"]),
        ("disabled on one rank", ["fa2"]),
        ("each for itself", ["fa3", "fa3", "fa3", "fa2"]),
        ("one has nothing", ["fa3", "fa3", "fa3", None]),
    ],
)
def test_the_best_that_every_rank_can_run(name: str, kernels: list[str], outcomes: dict[str, Any]) -> None:
    assert outcomes[name][0]["kernels"] == kernels


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("sm89 and sm120", ["agreed by 4 ranks: sm89 (ranks 0, 2), sm120 (ranks 1, 3)"]),
        (
            "one rank lacks FA3",
            ["kernel-not-installed: FA3 on rank 3 is not installed", "rank 3: install ", "for FLASH_ATTN/fa3"],
        ),
        ("disabled on one rank", ["FA3 on rank 2 is disabled by MLA_PREFILL_DISABLE=fa3"]),
        ("nothing in common", ["FA3 on ranks 2-3 is not installed", "FA2 on ranks 0-1 is not installed"]),
        ("two versions", ["flash-attn 2.8.3 (rank 0), flash-attn 2.7.4.post1 (ranks 1-3)"]),
        ("other questions", ["ranks asked different questions", "'float16'", "(rank 2)"]),
        ("other matrices", ["ranks have different matrices", "(ranks 0, 2-3)", "(rank 1)", "MLA_PREFILL_MATRIX"]),
        ("mistyped variable", ["rank 3", "MLA_PREFILL_DISABEL", "did you mean"]),
        ("unknown name on one rank", ["rank 2: unknown backend 'fa33'"]),
        ("no request on one rank", ["ranks that cannot take part: RequestError: select takes a Request", "(rank 1)"]),
        ("no pickle on one rank", ["ranks that cannot take part", "pickle", "(rank 1)"]),
        (
            "sm86 and sm87",
            ["the same package and version on every rank", "flash-attn 2.8.3 (rank 0)", "vllm 0.33.0 (ranks 1-3)"],
        ),
    ],
)
def test_the_text_names_the_ranks(name: str, lines: list[str], outcomes: dict[str, Any]) -> None:
    text = outcomes[name][0]["text"]
    assert [line for line in lines if line not in text] == [], text


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("nothing in common", "NoBackendError"),
        ("two versions", "NoBackendError"),
        ("other questions", "GroupError"),
        ("other matrices", "GroupError"),
        ("mistyped variable", "GroupError"),
        ("no request on one rank", "GroupError"),
        ("no pickle on one rank", "GroupError"),
        ("sm86 and sm87", "NoBackendError"),
        ("unknown name on one rank", "GroupError"),
    ],
)
def test_every_rank_gets_the_error(name: str, error: str, outcomes: dict[str, Any]) -> None:
    assert [got["error"] for got in outcomes[name]] == [error] * 4


def test_a_subgroup_agrees_for_itself(outcomes: dict[str, Any]) -> None:
    assert [got["kernels"] for got in outcomes["subgroup"]] == [["fa2"], ["fa3"], ["fa2"], ["fa3"]]


def test_where_all_are_alike_the_answer_is_that_of_one(outcomes: dict[str, Any]) -> None:
    alone = select(REQUEST, Environment("sm90", ALL)).to_dict()
    together = outcomes["alike"][0]["answer"][0]
    assert together["chosen"] == alone["chosen"]
    assert [c["kernel"] for c in together["candidates"]] == [c["kernel"] for c in alone["candidates"]]


def test_without_a_group_it_is_select() -> None:
    environment = Environment("sm90", ALL)
    assert select_for_group(REQUEST, environment=environment) is select(REQUEST, environment)
    (own,) = select_for_group(REQUEST, environment=environment, per_rank=True)
    assert own == select(REQUEST, environment)
    assert not isinstance(own, GroupDecision)


def cuda_devices() -> int:
    torch = pytest.importorskip("torch")
    return int(torch.cuda.device_count()) if torch.cuda.is_available() and torch.distributed.is_nccl_available() else 0


@pytest.mark.parametrize(
    ("backend", "size"),
    [
        ("gloo", 1),
        ("gloo", 2),
        *(pytest.param(how, size, marks=pytest.mark.gpu) for size in (1, 2, 4, 8) for how in (SET, BOUND)),
    ],
)
def test_the_exchange_is_the_same_on_every_transport(
    tmp_path: Path, backend: str, size: int, request: pytest.FixtureRequest
) -> None:
    """NCCL moves the statements through GPUs, one a rank."""
    if backend != "gloo" and cuda_devices() < size:
        pytest.skip(f"NCCL wants a CUDA device for each rank: {size}, here {cuda_devices()}")
    overlay = tmp_path / "site.yaml"
    overlay.write_text(SITE)
    results = run(tmp_path, backend, size, OVERLAY=str(overlay))
    if size == len(RANKS):
        on_gloo = request.getfixturevalue("outcomes")
        assert {name: [result[name] for result in results] for name in SCENARIOS} == on_gloo
        return
    assert all(result == results[0] for result in results)
    got = results[0]
    assert got["alike"]["kernels"] == ["fa3"]
    assert got["the last rank lacks FA3"]["kernels"] == ["fa2"]
    assert (f"FA3 on rank {size - 1} is not installed" in got["the last rank lacks FA3"]["text"]) == (size > 1)
    alone = got["this machine, each for itself"]["kernels"]
    assert len(alone) == size
    if all(kernel == alone[0] for kernel in alone):
        assert got["this machine"].get("kernels", [None]) == alone[:1]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            ("DistBackendError", "NCCL error in: NCCLUtils.cpp\nDuplicate GPU detected : rank 1 and rank 0"),
            r"DistBackendError: NCCL error in.*torch.cuda.set_device\(local_rank\)",
        ),
        (("DistNetworkError", "Connection reset by peer"), r"\(DistNetworkError: Connection reset by peer\)$"),
        (("DistError", "Numpy is not available"), "install it on every rank"),
    ],
)
def test_an_exchange_that_fails_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, error: tuple[str, str], says: str
) -> None:
    dist = pytest.importorskip("torch").distributed

    def fails(*_: Any, **__: Any) -> None:
        raise getattr(dist, error[0])(error[1])

    monkeypatch.setattr(group, "_is_distributed", lambda _: True)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(dist, "all_gather_object", fails)
    with pytest.raises(GroupError, match=says):
        select_for_group(REQUEST, environment=Environment("sm90", ALL))


def test_it_does_not_import_torch() -> None:
    code = (
        "import sys; from mla_prefill import *; "
        "select_for_group(Request((64, 64, 128)), environment=Environment('sm90')); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
