"""What shipped binaries hold: the machine code in installed packages, and the kernels of flashinfer-cubin by name.

A shared object is asked with NVIDIA's ``cuobjdump`` (part of the CUDA toolkit, and of the triton package), which names
the target of each piece of device code and the kernels in it. A cell is proven where the code that its architecture
would run holds a kernel of these widths, dtype and mask. Nothing is imported and no GPU is needed.
"""

from __future__ import annotations

import ctypes
import fnmatch
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mla_prefill.backends import packages
from mla_prefill.backends.verify import EVERYTHING, Wanted
from mla_prefill.capabilities.matrix import UnknownNameError
from mla_prefill.capabilities.versions import contains
from mla_prefill.selector.detection import installed

if TYPE_CHECKING:
    from mla_prefill.capabilities.matrix import Cell, Matrix
    from mla_prefill.capabilities.model import MLADimensions

#: operation -> whether it is causal.
OPERATIONS = {"new_tokens": True, "context_chunk": False}

#: The dtypes that FlashAttention kernels are asked for. Their FP8 kernels are no prefill of the kernel sheet.
HALVES = ("bfloat16", "float16")

Report = Callable[[str], None]


class Entry(NamedTuple):
    """One cell to prove: a kernel on an architecture for one dims block, dtype and operation."""

    cell: Cell
    arch: str
    dims: MLADimensions
    dtype: str
    operation: str

    @property
    def qk(self) -> int:
        return self.dims.qk_head_dim

    @property
    def pad_v_to(self) -> int | None:
        return self.cell.fit.pad_v_to if self.cell.fit else None

    @property
    def width_v(self) -> int:
        """The width of V that the kernel sees."""
        return self.pad_v_to or self.dims.v_head_dim

    @property
    def causal(self) -> bool:
        return OPERATIONS[self.operation]

    def to_dict(
        self, how: str, ok: bool | None, *, provider: str = "", claimed: bool = True, **said: Any
    ) -> dict[str, Any]:
        """The entry of an evidence record.

        Args:
            how: compiled, binary or cubin.
            ok: None where it was not tried to the end.
            provider: a distribution of the kernel sheet; by default the kernel's first.
            claimed: whether the kernel sheet offers the cell through this provider.
            said: detail, refusal (the exact text) and seconds; None is left out.
        """
        return {
            "kernel": self.cell.kernel.name,
            "provider": provider or self.cell.kernel.providers[0].distribution,
            "arch": self.arch,
            "dims": list(self.dims),
            "qk": self.qk,
            "v": self.dims.v_head_dim,
            "pad_v_to": self.pad_v_to,
            "dtype": self.dtype,
            "operation": self.operation,
            "allowed": claimed and self.cell.allowed and self.dtype in self.cell.candidate.dtypes,
            "ok": ok,
            "how": how,
            **{name: value for name, value in said.items() if value is not None},
        }


def entries(
    matrix: Matrix, kernel: str, arch: str, dtypes: Sequence[str] = HALVES, wanted: Wanted = EVERYTHING
) -> Iterator[Entry]:
    """A kernel's cells on an architecture: every dims block, dtype and operation, of those that are wanted."""
    if not wanted.any_of([kernel]):
        return
    for dims in wanted.dims or dict.fromkeys(block.dims for block in matrix.blocks.values()):
        cell = next(c for c in matrix.cells(arch, dims) if c.kernel.name == kernel)
        for dtype in (d for d in dtypes if d in (wanted.dtypes or dtypes)):
            for operation in OPERATIONS:
                yield Entry(cell, arch, dims, dtype, operation)


def usable(cell: Cell, distribution: str, version: str, dtype: str | None = None) -> bool:
    """Whether the kernel sheet offers this cell through this version of a package, with nothing known to be wrong."""
    offer = next((offer for offer in cell.offers if offer.distribution == distribution), None)
    if offer is None or not contains(offer.specifier, version):
        return False
    bad = any(contains(bad.version, version) for bad in offer.known_bad if not bad.needs and not bad.dtypes)
    return not bad and (dtype is None or dtype in offer.described.dtypes)


# ---- shared objects --------------------------------------------------------------------------------------------------


class Shipped(NamedTuple):
    """Where a package keeps the machine code of a kernel."""

    kernel: str
    distribution: str
    files: str


#: PyTorch's own FA2 is not asked: its library holds every kernel of PyTorch.
SHIPPED = tuple(Shipped(row["kernel"], row["distribution"], row["files"]) for row in packages.read()["machine_code"])
PACKAGES = tuple(dict.fromkeys(shipped.distribution for shipped in SHIPPED))


class Function(NamedTuple):
    """A forward kernel by its template arguments: the widths it was instantiated for, dtype and mask."""

    qk: int
    v: int
    dtype: str
    causal: bool


class Code(NamedTuple):
    """Device code for one target: machine code, or PTX that the driver compiles for a newer architecture."""

    target: str
    ptx: bool
    functions: frozenset[Function]

    def __str__(self) -> str:
        return f"{self.target} {'PTX' if self.ptx else 'machine code'}"


def shipped_cells(
    matrix: Matrix, arches: Iterable[str], report: Report, wanted: Wanted = EVERYTHING
) -> list[dict[str, Any]]:
    """A cell for each kernel that an installed binary holds, or that the kernel sheet offers and it does not hold."""
    arches, versions = tuple(arches), installed(PACKAGES)
    cells: list[dict[str, Any]] = []
    if not versions:
        report(f"fa2 and fa3 were not asked: none of {', '.join(PACKAGES)} is installed")
    for shipped in SHIPPED:
        if shipped.distribution not in versions or not wanted.any_of([shipped.kernel]):
            continue
        version = versions[shipped.distribution]
        try:
            codes = [code for path in files_of(shipped) for code in read_binary(path)]
        except CannotAsk as error:
            report(f"{shipped.kernel} of {shipped.distribution} {version} was not asked: {error}")
            continue
        found = list(held_cells(matrix, shipped, version, codes, arches, wanted))
        held = ", ".join(dict.fromkeys(cell["arch"] for cell in found if cell["ok"]))
        report(
            f"{shipped.kernel} of {shipped.distribution} {version} holds {', '.join(map(str, codes))}: "
            f"{sum(cell['ok'] for cell in found)} of {len(found)} cells, on {held or 'no asked architecture'}"
        )
        cells += found
    return cells


def held_cells(
    matrix: Matrix,
    shipped: Shipped,
    version: str,
    codes: Sequence[Code],
    arches: Iterable[str],
    wanted: Wanted = EVERYTHING,
) -> Iterator[dict[str, Any]]:
    """The cells of one kernel in one package. What nobody claims and the binary does not hold is no cell."""
    package = shipped.distribution
    for arch in arches:
        runnable = [code for code in codes if runs_on(matrix, code.target, code.ptx, arch)]
        for entry in entries(matrix, shipped.kernel, arch, wanted=wanted):
            claimed = usable(entry.cell, package, version, entry.dtype)
            code, function = find(runnable, entry) if entry.cell.fit else (None, None)
            if code and function:
                detail = f"{code} of the ({function.qk}, {function.v}) kernel"
                detail += "" if claimed else f"; the kernel sheet does not offer it through {package}"
                yield entry.to_dict("binary", True, provider=package, claimed=claimed, detail=detail)
            elif claimed:
                held = ", ".join(sorted(map(str, runnable))) or "nothing that runs there"
                refusal = f"{package} {version} holds no such kernel for {arch} (of its code, {held})"
                yield entry.to_dict("binary", False, provider=package, refusal=refusal)


def find(codes: Iterable[Code], entry: Entry) -> tuple[Code | None, Function | None]:
    """The smallest kernel that covers a cell, in machine code before PTX. Unequal widths have kernels of their own."""
    for code in sorted(codes, key=lambda code: code.ptx):
        covering = [
            function
            for function in code.functions
            if (function.dtype, function.causal) == (entry.dtype, entry.causal)
            and function.qk >= entry.qk
            and function.v >= entry.width_v
            and (function.qk == function.v) == (entry.qk == entry.width_v)
        ]
        if covering:
            return code, min(covering)
    return None, None


def runs_on(matrix: Matrix, target: str, ptx: bool, arch: str) -> bool:
    """Whether an architecture runs code of a target such as ``sm_80``, ``sm_90a`` or ``sm_100f``.

    Machine code runs on its own major version from its own minor version on, PTX on anything newer; an ``a`` binds both
    to one architecture, an ``f`` to a family (CUDA C++ programming guide, sections on compatibility and feature sets).
    """
    here = matrix.architectures[arch].capability
    built = capability_of(matrix, target)
    if here is None or built is None:
        return False
    own = numbers(here)
    if target.endswith("a"):
        return own == built
    if ptx and not target.endswith("f"):
        return built <= own
    if any(own_code_only(matrix, capability) for capability in (own, built)):
        return own == built
    return own[0] == built[0] and built[1] <= own[1]


def own_code_only(matrix: Matrix, capability: tuple[int, ...]) -> bool:
    """Whether this is an integrated GPU, which runs machine code for itself alone, and whose code nothing else runs."""
    arches = packages.read()["runs_only_its_own_machine_code"]["arch"]
    return any(capability_of(matrix, arch) == capability for arch in arches)


def capability_of(matrix: Matrix, target: str) -> tuple[int, ...] | None:
    """(9, 0) for ``sm_90a``; None for a target that no declared architecture has."""
    for spelling in (target, target.rstrip("af")):
        try:
            capability = matrix.architectures[matrix.arch(spelling)].capability
        except UnknownNameError:
            continue
        return numbers(capability) if capability else None
    return None


def numbers(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))


# ---- asking cuobjdump ------------------------------------------------------------------------------------------------


class CannotAsk(Exception):
    """Why a binary could not be asked; never leaves this module."""


def files_of(shipped: Shipped) -> list[Path]:
    """The installed files of a kernel.

    Raises:
        CannotAsk: the package has none, as a build for the CPU or for ROCm.
    """
    listed = importlib.metadata.distribution(shipped.distribution).files or ()
    paths = [Path(str(file.locate())) for file in listed if fnmatch.fnmatch(str(file), shipped.files)]
    found = [path for path in paths if path.is_file()]
    if not found:
        raise CannotAsk(f"it has no file {shipped.files}")
    return found


def cuobjdump() -> str:
    """Raises CannotAsk where there is none."""
    places = [shutil.which("cuobjdump")]
    places += [f"{os.environ[name]}/bin/cuobjdump" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    triton = importlib.util.find_spec("triton")
    for folder in (triton and triton.submodule_search_locations) or ():
        places.append(f"{folder}/backends/nvidia/bin/cuobjdump")
    for place in filter(None, places):
        if os.access(place, os.X_OK):
            return place
    raise CannotAsk("there is no cuobjdump on the PATH or in CUDA_HOME; pip install triton brings one")


def read_binary(path: Path) -> list[Code]:
    """The device code of a shared object.

    Raises:
        CannotAsk: no tool to ask with, or it failed.
    """
    command = [cuobjdump(), "--dump-elf-symbols", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as tool:
        assert tool.stdout is not None
        codes = parse_dump(tool.stdout, demangle)
    if tool.returncode:
        raise CannotAsk(f"{' '.join(command)} ended with exit status {tool.returncode}")
    return codes


def parse_dump(lines: Iterable[str], demangle: Callable[[str], str]) -> list[Code]:
    """What ``cuobjdump --dump-elf-symbols`` says: each target once, with its functions.

    PTX is listed without names. Where there are as many pieces of it as of machine code for the same target, both come
    from the same translation units and hold the same kernels; else nothing is known about it.
    """
    ptx = False
    target = ""
    pieces: dict[tuple[str, bool], int] = {}
    names: dict[str, set[str]] = {}
    for line in lines:
        if line.startswith("Fatbin "):
            ptx = line.startswith("Fatbin ptx")
        elif line.startswith("arch = "):
            target = line.removeprefix("arch = ").strip()
            pieces[target, ptx] = pieces.get((target, ptx), 0) + 1
        elif "STO_ENTRY" in line and any(pattern.marker in line for pattern in PATTERNS):
            names.setdefault(target, set()).add(line.split()[-1])
    codes = []
    for (target, ptx), count in sorted(pieces.items()):
        known = not ptx or count == pieces.get((target, False))
        functions = (parse_function(demangle(name), target) for name in names.get(target, ()) if known)
        codes.append(Code(target, ptx, frozenset(f for f in functions if f is not None)))
    return codes


class Pattern(NamedTuple):
    """How a forward kernel looks once demangled. ``majors``: elsewhere its body is compiled to nothing."""

    marker: str
    demangled: re.Pattern[str]
    majors: tuple[str, ...] = ()


_TILE = r"cute::tuple<cute::C<\d+>, cute::C<\d+>, cute::C<(?P<qk>\d+)> ?>, (?P<v>\d+), cutlass::(?P<dtype>\w+), float, "
#: Is_causal, Is_local, Has_softcap, Varlen
_MASKS = r"cutlass::arch::Sm\d+, (?P<causal>true|false), false, false, true,"

#: flash-attn (csrc/flash_attn/src/flash_fwd_kernel.h, kernel_traits.h) and hopper/ (mainloop_fwd_sm80.hpp,
#: mainloop_fwd_sm90_tma_gmma_ws.hpp; utils.h: enable_sm80_to_sm89, enable_sm90_or_later).
PATTERNS = (
    Pattern(
        "16flash_fwd_kernelI",
        re.compile(
            r"flash_fwd_kernel<Flash_fwd_kernel_traits<(?P<qk>(?P<v>\d+)), \d+, \d+, \d+, \w+, \w+, "
            r"cutlass::(?P<dtype>\w+), .*?> ?>, false, (?P<causal>true|false), false, false,"
        ),
    ),
    Pattern("FlashAttnFwdSm80", re.compile(r"CollectiveMainloopFwdSm80<[^<]*" + _TILE + _MASKS), ("sm_8",)),
    Pattern(
        "FlashAttnFwdSm90",
        re.compile(r"CollectiveMainloopFwdSm90<\d+, cute::tuple<(?:cute::C<\d+>,? ?){3}>, " + _TILE + _MASKS),
        ("sm_9",),
    ),
)
CUTLASS_DTYPES = {"bfloat16_t": "bfloat16", "half_t": "float16"}


def parse_function(name: str, target: str) -> Function | None:
    """A demangled name as a forward kernel of the target; None for anything else, and for other dtypes."""
    for pattern in PATTERNS:
        match = pattern.demangled.search(name)
        if match and match["dtype"] in CUTLASS_DTYPES and target.startswith(pattern.majors or "sm_"):
            dtype = CUTLASS_DTYPES[match["dtype"]]
            return Function(int(match["qk"]), int(match["v"]), dtype, match["causal"] == "true")
    return None


@lru_cache(maxsize=1)
def _demangler() -> Callable[[str], str]:
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        free = ctypes.CDLL(None).free
    except OSError as error:
        raise CannotAsk(f"no libstdc++ to read its names with ({error})") from error
    function = library.__cxa_demangle
    function.restype = ctypes.c_void_p
    free.argtypes = [ctypes.c_void_p]

    def demangle(name: str) -> str:
        text = function(name.encode(), None, None, ctypes.byref(ctypes.c_int()))
        if not text:
            return name
        try:
            return ctypes.string_at(text).decode(errors="replace")
        finally:
            free(text)

    return demangle


def demangle(name: str) -> str:
    """A C++ symbol as written in the source. Raises CannotAsk where the C++ runtime is missing."""
    return _demangler()(name)


# ---- flashinfer-cubin ------------------------------------------------------------------------------------------------

TRTLLM, CUBINS = "trtllm_ragged", "flashinfer-cubin"

#: fmhaSm100fKernel_QkvBfloat16OBfloat16HQk192HV128SeparateQkvCausalVarSeqQ128Kv128PersistentContext.cubin
_CUBIN = re.compile(
    r"fmhaSm(?P<target>\d+[af]?)Kernel_Qkv(?P<dtype>[A-Z][a-z0-9]+)O(?P<out>[A-Z][a-z0-9]+)"
    r"H(?:Qk(?P<qk>\d+)HV(?P<v>\d+)|(?P<equal>\d+))SeparateQkv(?P<mask>Causal|Dense)VarSeqQ\d+Kv\d+\w*Context\.cubin"
)
#: A kernel's dtype and the output it must write: 16 bit, as the kernel sheet's fp8_query says.
CUBIN_DTYPES = {
    ("Bfloat16", "Bfloat16"): "bfloat16",
    ("Fp16", "Fp16"): "float16",
    ("E4m3", "Bfloat16"): "float8_e4m3fn",
}


def cubin_packages() -> dict[str, str]:
    """The cubins' version, which is that of the package whose kernel they are: both are released together."""
    return {name: version for version in installed((CUBINS,)).values() for name in (CUBINS, "flashinfer-python")}


def trtllm_cells(
    matrix: Matrix, arches: Iterable[str], report: Report, wanted: Wanted = EVERYTHING
) -> list[dict[str, Any]]:
    """Which kernels of ``trtllm_ragged_attention_deepseek`` flashinfer-cubin has, by its file names."""
    version = installed((CUBINS,)).get(CUBINS)
    if version is None:
        report("trtllm_ragged was not asked: flashinfer-cubin is not installed (458 MB)")
        return []
    listed = importlib.metadata.distribution(CUBINS).files or ()
    codes = parse_cubins(file.name for file in listed)
    found = list(cubin_cells(matrix, version, codes, arches, wanted))
    targets = ", ".join(f"{len(code.functions)} for {code.target}" for code in codes)
    report(f"trtllm_ragged of flashinfer-cubin {version}: kinds of ragged context kernels, {targets}")
    return found


def parse_cubins(names: Iterable[str]) -> list[Code]:
    """The context kernels with separate q, k and v among file names, by target."""
    found: dict[str, set[Function]] = {}
    for match in filter(None, map(_CUBIN.fullmatch, names)):
        dtype = CUBIN_DTYPES.get((match["dtype"], match["out"]))
        if dtype is None or "Sage" in match[0]:  # Sage kernels take other scales
            continue
        qk, v = (int(match[name] or match["equal"]) for name in ("qk", "v"))
        found.setdefault(f"sm_{match['target']}", set()).add(Function(qk, v, dtype, match["mask"] == "Causal"))
    return [Code(target, False, frozenset(functions)) for target, functions in sorted(found.items())]


def cubin_cells(
    matrix: Matrix, version: str, codes: Sequence[Code], arches: Iterable[str], wanted: Wanted = EVERYTHING
) -> Iterator[dict[str, Any]]:
    """A cell for each dtype that any kernel has, on each architecture of the kernel sheet."""
    dtypes = sorted({function.dtype for code in codes for function in code.functions})
    for arch in (arch for arch in arches if arch in matrix.kernels[TRTLLM].arch):
        runnable = [code for code in codes if runs_on(matrix, code.target, code.ptx, arch)]
        for entry in entries(matrix, TRTLLM, arch, dtypes, wanted):
            if entry.cell.fit and not usable(entry.cell, "flashinfer-python", version):
                continue
            exact = Function(entry.qk, entry.width_v, entry.dtype, entry.causal)
            code = next((code for code in runnable if exact in code.functions), None)
            if code:
                yield entry.to_dict("cubin", True, detail=f"{CUBINS} {version} has a kernel for {code.target}")
            else:
                mask = "causal" if entry.causal else "dense"
                refusal = f"{CUBINS} {version} has no {mask} {entry.dtype} kernel of these widths that runs on {arch}"
                yield entry.to_dict("cubin", False, refusal=refusal)
