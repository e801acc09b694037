"""What ``verify`` and ``bench`` state about the machine they ran on, and where they write their records."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from mla_prefill.capabilities import fixes
from mla_prefill.capabilities.load import DATA_DIR, in_checkout
from mla_prefill.capabilities.matrix import Matrix
from mla_prefill.selector import detection

#: Packages that provide no kernel and still decide how one behaves: compilers, cuDNN, prebuilt kernels.
BENEATH = (
    "apache-tvm-ffi",
    "flashinfer-cubin",
    "flashinfer-jit-cache",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-cutlass-dsl",
    "quack-kernels",
    "triton",
)


def machine(device: torch.device) -> dict[str, str | None]:
    """GPU, driver, and what PyTorch was built for; None for what a CPU has not."""
    on_gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "driver": driver_version() if on_gpu else None,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or getattr(torch.version, "hip", None),
    }


def driver_version() -> str | None:
    """NVIDIA's driver, by NVML; None where there is none."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    version = ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        found = nvml.nvmlSystemGetDriverVersion(version, ctypes.c_uint(len(version))) == 0
        return version.value.decode() if found else None
    finally:
        nvml.nvmlShutdown()


def packages(matrix: Matrix) -> dict[str, str]:
    """Every installed package that provides a kernel or lies beneath one, with its version."""
    return detection.installed(sorted({*matrix.distributions, *BENEATH}))


def keep(kind: str, stem: str, text: str, output: str | Path | None = None, *, beside: bool = False) -> Path:
    """Writes a record and says where: into the user's file, else into a new one, so that a partial sweep does not
    replace a full one.

    Args:
        kind: the folder below ``capabilities/data``: ``evidence`` or ``measured``.
        stem: what the record is about and its date, in any spelling.
        output: the user's file (ends in ``.json``) or folder. None: the data folder of a checkout that can be written
            to, else the working directory.
        beside: the user's file is taken by another record of this run; a new one beside it is made.

    Raises:
        ValueError: ``output`` is a file of another kind, or cannot be written.
    """
    path, named = target(kind, stem, output)
    if named and not beside:
        write(path, text)
        return path
    path = _new(path)
    try:
        write(path, text)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def target(kind: str, stem: str, output: str | Path | None) -> tuple[Path, bool]:
    """(the user's file, or the usual name in a folder; whether the user named it)."""
    if output is not None and _names_a_file(output):
        return Path(output), True
    folder = Path(output) if output is not None else default_folder(kind)
    return folder / f"{re.sub(r'[^a-z0-9]+', '-', stem.lower()).strip('-')}.json", False


def _new(path: Path) -> Path:
    """An empty file of this name, or with a number behind it: made at once, so that no other process takes the name."""
    names = (path.with_stem(f"{path.stem}-{i}") for i in range(2, 10_000))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for free in (path, *names):
            with contextlib.suppress(FileExistsError):
                free.touch(exist_ok=False)
                return free
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error
    raise ValueError(f"cannot write {path}: 9999 files of this name are there; give --output another folder")


def default_folder(kind: str) -> Path:
    return DATA_DIR / kind if in_checkout() and os.access(DATA_DIR, os.W_OK) else Path()


def _names_a_file(output: str | Path) -> bool:
    path = Path(output)
    if path.is_dir() or str(output).endswith(os.sep):
        return False
    if path.suffix not in ("", ".json"):
        raise ValueError(f"--output {output}: give a .json file such as {path.with_suffix('.json')}, or a folder")
    return path.suffix == ".json"


def check_target(kind: str, output: str | Path | None, *beside: str) -> None:
    """Raises ValueError where a record could not be written: said before the work, not after it.

    Args:
        beside: suffixes of what is written next to the record.
    """
    record, named = target(kind, "probe", output)
    for path in (record, *map(record.with_suffix, beside)):
        try:
            _try(path)
        except OSError as error:
            said = path if named or output is None else output
            raise ValueError(f"cannot write {said}: {error.strerror}; give --output another file or folder") from error


def _try(path: Path) -> None:
    """What may be written is not what the mode bits say, for root above all."""
    if path.is_file():
        path.open("ab").close()
    elif path.exists():
        raise OSError(errno.EINVAL, "not a regular file")
    with tempfile.TemporaryFile(dir=next(parent for parent in path.resolve().parents if parent.exists())):
        pass


def write(path: Path, text: str) -> None:
    """Whole or not at all, as `fixes.write`. Raises ValueError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error
    fixes.write(path, text.encode())


def one_line(error: BaseException | str, limit: int = 400) -> str:
    """A text without line breaks, cut in the middle where it is long: both ends of an error say something."""
    text = " ".join(str(error).split())
    half = (limit - 5) // 2
    return text if len(text) <= limit else f"{text[:half]} ... {text[-half:]}"


def lined(record: dict[str, Any], key: str) -> str:
    """JSON with one line for each entry of ``record[key]``, so that a change of one cell is a change of one line."""
    from json import dumps

    head = {name: value for name, value in record.items() if name != key}
    entries = ",\n".join(f"  {dumps(entry)}" for entry in record[key])
    opening = dumps(head, indent=1)[:-2]
    return f'{opening},\n "{key}": [\n{entries}\n ]\n}}\n'
