"""Operators: functions of tensors, each with a reference, several backends and one table that says which runs.

`explain()` prints the table for this machine; `with use_backend("torch"):` forces a backend.
"""

from .backends import BackendUnavailable, UnsupportedByBackend, backend_report, explain, use_backend
from .causal_conv1d import causal_conv1d, causal_conv1d_update, centred_conv1d
from .quasiseparable import quasiseparable, quasiseparable_matrix
from .rms_norm import gated_rms_norm, rms_norm
from .selective_scan import selective_scan, selective_scan_matrix, selective_scan_update
from .ssd import ssd, ssd_matrix, ssd_update

__all__ = [
    "BackendUnavailable",
    "UnsupportedByBackend",
    "backend_report",
    "causal_conv1d",
    "causal_conv1d_update",
    "centred_conv1d",
    "explain",
    "gated_rms_norm",
    "quasiseparable",
    "quasiseparable_matrix",
    "rms_norm",
    "selective_scan",
    "selective_scan_matrix",
    "selective_scan_update",
    "ssd",
    "ssd_matrix",
    "ssd_update",
    "use_backend",
]
