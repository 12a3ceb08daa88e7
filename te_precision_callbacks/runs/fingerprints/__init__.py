"""What a checkpoint holds of the state of low precision, and whether a resume has restored it.

Usage::

    for rank, fingerprint in read(Path("checkpoint-500"), rank=0).items():
        print(rank, fingerprint.iteration, len(fingerprint.layers))
"""

from __future__ import annotations

from te_precision_callbacks.runs.fingerprints.changes import Finding, ResumeReport
from te_precision_callbacks.runs.fingerprints.fingerprint import FILE_NAME, Fingerprint, FingerprintError, read

__all__ = ["FILE_NAME", "Finding", "Fingerprint", "FingerprintError", "ResumeReport", "read"]
