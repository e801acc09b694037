"""Finding the architecture and the installed packages of this machine by the cheapest means that answers."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mla_prefill.capabilities.versions import canonical
from mla_prefill.selector import telling

Found = tuple[str, str | None, str]

#: In how something was found where the GPUs of this machine are of several kinds, so that the current one counts.
DIFFER = "the GPUs differ"

#: There is such a file where a driver runs a GPU, even in a container that lacks the driver's library.
DEVICE_NODES = ("/dev/nvidiactl", "/dev/kfd")


def architecture() -> Found:
    """(architecture, product name, how it was found), from the first that answers: a torch that already runs on a GPU,
    NVML, the AMD driver, torch, the CPU.

    The first visible device counts, or torch's current one; where its place in CUDA's order is not certain, the last
    item says so. A torch that has not touched the GPU yet is asked after the drivers: asking it would start CUDA, and
    then the process could not fork workers that use the GPU. It is imported, which takes seconds, only where there is
    a GPU that no driver library answers for.
    """
    return (
        _from_torch(started=True)
        or _from_nvml()
        or _from_amd_driver()
        or _from_torch(started=False)
        or ("cpu", None, "no GPU driver found")
    )


def _from_torch(started: bool) -> Found | None:
    torch = sys.modules.get("torch")
    try:
        if started and not (torch and torch.cuda.is_initialized()):
            return None
        if torch is None:
            if _hidden() or not any(map(os.path.exists, DEVICE_NODES)):
                return None
            torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            return None
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        names = {torch.cuda.get_device_properties(index).name for index in range(torch.cuda.device_count())}
    except Exception:  # no torch, a broken or a half-imported one: none of them may break a query
        return None
    gcn = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    how = "torch" if len(names) < 2 else f"torch; {DIFFER}, and this is the current one"
    return (gcn or f"{properties.major}.{properties.minor}", properties.name, how)


class Gpu(NamedTuple):
    """One GPU as its driver tells it; ``arch`` in the driver's own spelling, ``name`` None where it has none."""

    arch: str
    name: str | None
    uuid: str


def _from_nvml() -> Found | None:
    entries = _listed("CUDA_VISIBLE_DEVICES")
    if _hides(entries):
        return None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        gpus = list(_nvml_gpus(nvml))
        if entries and entries[0].startswith("MIG-"):
            return _mig_slice(nvml, gpus, entries[0])
    finally:
        nvml.nvmlShutdown()
    return _first_of(gpus, entries)


def _first_of(gpus: list[Gpu], entries: list[str] | None) -> Found | None:
    """What CUDA calls device 0. Its own order is not NVML's, which is that of the PCI bus."""
    ordered = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or bool(entries and not entries[0].isdecimal())
    kinds = list(dict.fromkeys(f"{gpu.name} ({gpu.arch})" for gpu in gpus))
    if ordered or len(kinds) < 2:
        seen = _seen(gpus, entries)
        how = "NVML" if len({gpu.name for gpu in seen}) < 2 else f"NVML; {DIFFER}, and this is the first one"
        return (seen[0].arch, seen[0].name, how) if seen else None
    # "Fastest first" by a heuristic that is not documented: across architectures the newest is the best guess.
    seen = _seen(sorted(gpus, key=lambda gpu: tuple(map(int, gpu.arch.split("."))), reverse=True), entries)
    if not seen:
        return None
    doubt = f"{DIFFER}, {', '.join(kinds)}, and CUDA's own order of them is not known here"
    if len({gpu.arch for gpu in gpus}) == 1:
        return (seen[0].arch, None, f"NVML; {doubt}")
    taken = f"taken: {seen[0].name}, as if newer were faster"
    cure = "CUDA_DEVICE_ORDER=PCI_BUS_ID, or a UUID in CUDA_VISIBLE_DEVICES, makes it certain"
    telling.warning("%s; %s; %s", doubt, taken, cure)
    return (seen[0].arch, seen[0].name, f"NVML; {doubt}; {taken}; {cure}")


def _nvml_gpus(nvml: Any) -> Iterator[Gpu]:
    """Every GPU that this process may use, in the order of the PCI bus."""
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)):
            continue
        if nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)):
            continue
        name = _text(nvml.nvmlDeviceGetName, _first_slice(nvml, handle) or handle)
        yield Gpu(f"{major.value}.{minor.value}", name, _text(nvml.nvmlDeviceGetUUID, handle) or "")


def _first_slice(nvml: Any, handle: ctypes.c_void_p) -> ctypes.c_void_p | None:
    """What CUDA shows of a GPU that is cut into MIG slices."""
    mode, pending, first = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_void_p()
    with suppress(AttributeError):  # drivers before 450
        if nvml.nvmlDeviceGetMigMode(handle, ctypes.byref(mode), ctypes.byref(pending)) or not mode.value:
            return None
        if not nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, ctypes.c_uint(0), ctypes.byref(first)):
            return first
    return None


def _mig_slice(nvml: Any, gpus: list[Gpu], entry: str) -> Found | None:
    """The GPU that a slice is of. The slice's name is its own: what was measured on the whole GPU is not for it."""
    handle, whole = ctypes.c_void_p(), ctypes.c_void_p()
    name, uuid = None, entry.removeprefix("MIG-").partition("/")[0]  # the older MIG-GPU-.../1/0 has the GPU's in it
    if not nvml.nvmlDeviceGetHandleByUUID(entry.encode(), ctypes.byref(handle)):
        name = _text(nvml.nvmlDeviceGetName, handle)
        if not nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle, ctypes.byref(whole)):
            uuid = _text(nvml.nvmlDeviceGetUUID, whole) or uuid
    seen = _seen(gpus, [uuid])
    return (seen[0].arch, name, "NVML, MIG") if seen else None


def _text(ask: Any, handle: ctypes.c_void_p) -> str | None:
    text = ctypes.create_string_buffer(96)
    return None if ask(handle, text, ctypes.c_uint(len(text))) else text.value.decode(errors="replace")


def _from_amd_driver(root: Path = Path("/sys/class/kfd/kfd/topology/nodes")) -> Found | None:
    gpus = []
    for properties in sorted(root.glob("*/properties"), key=lambda p: int(p.parent.name)):
        try:
            fields = dict(line.split(None, 1) for line in properties.read_text().splitlines() if " " in line)
        except OSError:
            continue
        if version := int(fields.get("gfx_target_version", "0")):
            arch = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
            gpus.append(Gpu(arch, None, f"GPU-{int(fields.get('unique_id', '0')):016x}"))
    # ROCr counts what there is, HIP what ROCr leaves of it.
    gpus = _seen(gpus, _listed("ROCR_VISIBLE_DEVICES"))
    gpus = _seen(gpus, _listed("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"))
    return (gpus[0].arch, None, "AMD driver") if gpus else None


# ---- the drivers' variables -----------------------------------------------------------------------------------------


def _listed(*variables: str) -> list[str] | None:
    """What the first of these variables that is set says: indices or UUIDs. None: every device."""
    value = next((os.environ[variable] for variable in variables if variable in os.environ), None)
    return None if value is None else [entry.strip() for entry in value.split(",")]


def _seen(gpus: list[Gpu], entries: list[str] | None) -> list[Gpu]:
    """The GPUs that these entries show, in their order; one that names no GPU or several hides itself and the rest."""
    if entries is None:
        return gpus
    seen = []
    for entry in entries:
        if entry.isdecimal():
            named = gpus[int(entry) : int(entry) + 1]
        else:  # the beginning of a UUID is enough
            named = [gpu for gpu in gpus if entry and gpu.uuid.lower().startswith(entry.lower())]
        if len(named) != 1:
            break
        seen += named
    return seen


def _hides(entries: list[str] | None) -> bool:
    """Whether every device is hidden on purpose."""
    return entries is not None and entries[0] in ("", "-1")


def _hidden() -> bool:
    variables = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    return any(_hides(_listed(variable)) for variable in variables)


def installed(distributions: Iterable[str]) -> dict[str, str]:
    """Distribution -> version of those that are installed, from their metadata alone."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str] = {}
    for name in distributions:
        try:
            known = version(name)
        except PackageNotFoundError:
            continue
        except Exception as error:  # metadata cut short by a broken install must not hide the other packages
            known = f"unreadable ({type(error).__name__})"
        found[canonical(name)] = known or "unreadable"
    return found
