"""Can one model's cache be used by another? Decided from specs alone."""

from kvtransfer.geometry.compat.checks import CHECKS
from kvtransfer.geometry.compat.report import CompatReport, Finding, Verdict
from kvtransfer.geometry.spec import ModelSpec

__all__ = ["CHECKS", "CompatReport", "Finding", "Verdict", "compare"]


def compare(source: ModelSpec, target: ModelSpec) -> CompatReport:
    """Run every check, including those after one that blocks: a reader wants the whole list."""
    findings = tuple(finding for run in CHECKS for finding in run(source, target))
    return CompatReport(source, target, findings)
