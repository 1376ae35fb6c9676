"""Findings of a report on bars, by their kinds."""


def finding_of(report, kind: str):
    """Return the finding of this kind, or None."""
    return next((finding for finding in report.findings if finding.kind == kind), None)


def kinds_of(report) -> tuple[str, ...]:
    """Return the kinds of the findings without expected gaps."""
    return tuple(finding.kind for finding in report.findings if finding.severity != "info")
