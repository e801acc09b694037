"""Writes tests/data/decisions.json: what the shipped matrix decides, in words to be reviewed.

    python tests/record_decisions.py

Run it after a change of the data, and review what changed. ``test_trust.py`` compares, and shows with it that no cell of
the data can change without somebody seeing it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mla_prefill.capabilities import Matrix, Offer, load_matrix
from mla_prefill.capabilities.model import Kernel
from mla_prefill.selector.engine import decide
from mla_prefill.selector.environment import Environment
from mla_prefill.selector.request import Request

GOLDEN = Path(__file__).parent / "data" / "decisions.json"


def snapshot(
    matrix: Matrix, arches: Iterable[str] | None = None, blocks: Iterable[str] | None = None
) -> dict[str, dict[str, Any]]:
    """Everything that answers depend on, for these architectures and dims blocks (all of them by default)."""
    wanted = list(arches or matrix.architectures)
    names = list(blocks or matrix.blocks)
    return {
        "architectures": {a: _architecture(matrix, a) for a in wanted},
        "kernels": {kernel.name: _convention(kernel) for kernel in matrix.kernels.values()},
        "limits": {f"{a} {k}": str(matrix.limit(k, a)) for a in wanted for k in matrix.kernels if matrix.limit(k, a)},
        "blocks": {name: str(block.dims) for name, block in matrix.blocks.items()},
        "families": {name: family.get("dims") for name, family in matrix.families.items()},
        "orders": {f"{a} {n}": _order(matrix, a, n) for a in wanted for n in names if n in matrix.blocks},
        "decisions": {f"{a} {n}": _decision(matrix, a, n) for a in wanted for n in names if n in matrix.blocks},
        "offers": {
            f"{a} {k}": offers for a in wanted for k in matrix.kernels if (offers := _offers(matrix, a, k, names))
        },
    }


def _architecture(matrix: Matrix, arch: str) -> str:
    a = matrix.architectures[arch]
    about = (a.vendor, a.capability, a.shared_memory_bytes, ", ".join(a.products), ", ".join(a.spellings))
    return "; ".join(map(str, about))


def _convention(kernel: Kernel) -> str:
    version = f"FlashAttention {kernel.fa_version}" if kernel.fa_version else "no FlashAttention version"
    about = (kernel.backend, version, " ".join(kernel.dtypes), " ".join(sorted(kernel.provides)), kernel.causal)
    return "; ".join(map(str, (*about, kernel.lse)))


def _decision(matrix: Matrix, arch: str, block: str) -> str:
    """The kernels in order, where one asks for nothing, and what is there on request or left out for a reason."""
    dims = matrix.blocks[block].dims
    dtype = "bfloat16" if matrix.architectures[arch].capability not in ("7.0", "7.5") else "float16"
    verdicts = decide(Request(dims, dtype), Environment(arch), matrix).verdicts
    chosen = [v.candidate for v in verdicts if v.verdict != "rejected"]
    text = ", ".join(c.kernel + (f" V to {c.pad_v_to}" if c.pad_v_to else "") for c in chosen) or "none"
    for cell in matrix.cells(arch, dims):
        if cell.allowed and cell.on_request is not None:
            text += f"; on request {cell.kernel.name}"
        if cell.not_allowed:
            text += f"; not {cell.kernel.name}: {cell.not_allowed.reason}"
    return text


def _order(matrix: Matrix, arch: str, block: str) -> str:
    order = matrix.order_for(arch, matrix.blocks[block].dims)
    return f"{' '.join(order.order)}; on request: {' '.join(order.on_request)}" if order else "none"


def _offers(matrix: Matrix, arch: str, kernel: str, blocks: Iterable[str]) -> dict[str, str]:
    """What each package offers, and the dims blocks for which it is this."""
    offers: dict[str, list[str]] = {}
    for name in blocks:
        dims = matrix.blocks[name].dims if name in matrix.blocks else None
        for cell in matrix.cells(arch, dims) if dims else ():
            if cell.kernel.name == kernel and cell.fit:
                offers.setdefault("; ".join(map(_offer, cell.offers)), []).append(name)
    return {text: " ".join(names) for text, names in offers.items()}


def _offer(offer: Offer) -> str:
    runs, provider = offer.described, offer.provider
    text = f"{offer.requirement} [{provider.module}] {' '.join(runs.dtypes)}: {' '.join(sorted(runs.provides))}"
    if provider.verified:
        text += f", checked {provider.verified}"
    return text + "".join(f", bad {' '.join((b.version, *b.dtypes, *b.needs))}" for b in offer.known_bad)


def main() -> None:
    GOLDEN.write_text(json.dumps(snapshot(load_matrix()), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
