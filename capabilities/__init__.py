"""The capability matrix: reading, checking and compiling it."""

from __future__ import annotations

from mla_prefill.capabilities.findings import Finding, MatrixError
from mla_prefill.capabilities.load import load_matrix
from mla_prefill.capabilities.matrix import Cell, Matrix, Offer, UnknownNameError
from mla_prefill.capabilities.model import Candidate, MLADimensions

__all__ = [
    "Candidate",
    "Cell",
    "Finding",
    "MLADimensions",
    "Matrix",
    "MatrixError",
    "Offer",
    "UnknownNameError",
    "load_matrix",
]
