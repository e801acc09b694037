"""Version ranges, by `packaging`'s own range algebra. Pre-releases always count: flash-attn-4 publishes only betas."""

from __future__ import annotations

import re
from functools import lru_cache

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

_REQUIREMENT = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(.*)\Z")
_CEILING = re.compile(r"<\s*([^,=*\s]+)")
_FLOOR = re.compile(r"(?:>=|==|~=)\s*([^,*]+?)(?:\.\*)?(?:,|\Z)")


def canonical(distribution: str) -> str:
    """The normalised name of a distribution (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


@lru_cache(maxsize=4096)
def split(requirement: str) -> tuple[str, str]:
    """``flash-attn-4>=4.0.0b11`` -> (``flash-attn-4``, ``>=4.0.0b11``). Raises ValueError on anything else."""
    match = _REQUIREMENT.match(requirement.strip())
    if match is None:
        raise ValueError(f"{requirement!r} is not a requirement such as flash-attn-4>=4.0.0b11")
    name, specifier = match.groups()
    try:
        SpecifierSet(specifier)
    except InvalidSpecifier:
        raise ValueError(f"{specifier!r} is not a version range such as >=2.6,<3") from None
    return canonical(name), specifier


@lru_cache(maxsize=4096)
def contains(specifier: str, version: str) -> bool | None:
    """Whether an installed version is in a range; None where the version cannot be read. A local part
    (``2.8.3+cu12``) names the flavour of a build and does not change the answer."""
    try:
        return SpecifierSet(specifier).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return None


@lru_cache(maxsize=4096)
def intersect(specifiers: tuple[str, ...]) -> str | None:
    """One range for several; None where nothing is left."""
    distinct = [s for s in dict.fromkeys(specifiers) if s]
    if len(distinct) < 2:
        return None if distinct and SpecifierSet(distinct[0]).to_range().is_empty else "".join(distinct)
    combined = SpecifierSet(distinct[0]).to_range()
    for specifier in distinct[1:]:
        combined = combined.intersection(SpecifierSet(specifier).to_range())
    if combined.is_empty:
        return None
    simple = combined.to_specifier_set()
    return ",".join(distinct) if simple is None else str(simple)


@lru_cache(maxsize=4096)
def without(specifier: str, bad: str) -> str:
    """``specifier`` less a known-bad range, where one range can say so; else ``specifier`` as it is."""
    left = SpecifierSet(specifier).to_range().difference(SpecifierSet(bad).to_range())
    for fixed in _CEILING.findall(bad):  # "from the fixed version on" reads better than the exact difference
        later = intersect((specifier, f">={fixed}"))
        low = floor(specifier)
        reaches_the_floor = low is not None and contains(bad, low)
        if later is not None and reaches_the_floor and SpecifierSet(later).to_range().difference(left).is_empty:
            return later
    simple = None if left.is_empty else left.to_specifier_set()
    return specifier if simple is None else str(simple)


@lru_cache(maxsize=4096)
def covers(outer: str, inner: str) -> bool:
    """Whether every version of ``inner`` is in ``outer``."""
    return SpecifierSet(inner).to_range().difference(SpecifierSet(outer).to_range()).is_empty


@lru_cache(maxsize=4096)
def floor(specifier: str) -> str | None:
    """The lowest version that a range names and holds: what an install hint proposes."""
    named = [m for m in _FLOOR.findall(specifier) if contains(specifier, m)]
    return max(named, key=Version) if named else None
