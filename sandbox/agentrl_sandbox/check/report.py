"""The table that `agentrl sandbox check` prints."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl_sandbox.check.suite import Finding


def line(finding: Finding) -> str:
    """One row, printed when its case is over."""
    verdict = "ok  " if finding.held else "FAIL"
    row = f"{verdict}  {finding.guards:<21}  {finding.name:<42}  {finding.seconds:6.2f} s"
    return row if finding.held else f"{row}\n      {finding.why}"


def summary(findings: Sequence[Finding]) -> str:
    """What held, by property.

    >>> print(summary([Finding(name="a", guards="robust", held=True, seconds=0.1)]))
    robust  1 of 1 held
    """
    guarded = dict.fromkeys(finding.guards for finding in findings)
    width = max(map(len, guarded), default=0)
    rows = []
    for name in guarded:
        own = [finding for finding in findings if finding.guards == name]
        rows.append(f"{name:<{width}}  {sum(finding.held for finding in own)} of {len(own)} held")
    return "\n".join(rows)
