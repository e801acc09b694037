"""Finding the architecture and the installed packages of this machine by the cheapest means that answers."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from mla_prefill.capabilities.versions import canonical

Found = tuple[str, str | None, str]


#: There is such a file where a driver runs a GPU, even in a container that lacks the driver's library.
DEVICE_NODES = ("/dev/nvidiactl", "/dev/kfd")


def architecture() -> Found:
    """(architecture, product name, how it was found), from the first that answers: a torch that already runs on a GPU,
    NVML, the AMD driver, torch, the CPU.

    The first visible device counts, or torch's current one. A torch that has not touched the GPU yet is asked after
    the drivers: asking it would start CUDA, and then the process could not fork workers that use the GPU. It is
    imported, which takes seconds, only where there is a GPU that no driver library answers for.
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
    except Exception:  # no torch, a broken or a half-imported one: none of them may break a query
        return None
    gcn = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    return (gcn or f"{properties.major}.{properties.minor}", properties.name, "torch")


def _hidden() -> bool:
    """Whether the variables hide every device."""
    return None in (
        _first_visible("CUDA_VISIBLE_DEVICES"),
        _first_visible("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    )


def _from_nvml() -> Found | None:
    index = _first_visible("CUDA_VISIBLE_DEVICES")
    if index is None:
        return None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        handle = ctypes.c_void_p()
        if index.isdecimal():
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(index)), ctypes.byref(handle))
        else:
            failed = nvml.nvmlDeviceGetHandleByUUID(index.encode(), ctypes.byref(handle))
        major, minor = ctypes.c_int(), ctypes.c_int()
        if failed or nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)):
            return None
        name = ctypes.create_string_buffer(96)
        named = nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name))) == 0
        return (f"{major.value}.{minor.value}", name.value.decode() if named else None, "NVML")
    finally:
        nvml.nvmlShutdown()


def _from_amd_driver(root: Path = Path("/sys/class/kfd/kfd/topology/nodes")) -> Found | None:
    index = _first_visible("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    if index is None or not index.isdecimal():
        return None
    versions = []
    for properties in sorted(root.glob("*/properties"), key=lambda p: int(p.parent.name)):
        try:
            fields = dict(line.split(None, 1) for line in properties.read_text().splitlines() if " " in line)
        except OSError:
            continue
        version = int(fields.get("gfx_target_version", "0"))
        if version:
            versions.append(version)
    if int(index) >= len(versions):
        return None
    major, minor, step = versions[int(index)] // 10000, versions[int(index)] // 100 % 100, versions[int(index)] % 100
    return (f"gfx{major}{minor:x}{step:x}", None, "AMD driver")


def _first_visible(*variables: str) -> str | None:
    """The first device that these variables leave visible; None where they hide all."""
    for variable in variables:
        value = os.environ.get(variable)
        if value is not None:
            first = value.split(",")[0].strip()
            return first if first and first != "-1" else None
    return "0"


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
