"""A failing seed in words: what broke, what led there, and how to see it again."""

from __future__ import annotations

from tracelake.testing.simulation.run import Outcome

COMMAND = "python -m tracelake.testing.simulation"
TAIL = 40


def failure(outcome: Outcome) -> str:
    findings = "\n".join(str(finding) for finding in outcome.findings)
    tail = "\n".join(outcome.lines[-TAIL:])
    return (
        f"seed {outcome.seed} broke an invariant\n{findings}\n"
        f"the last {min(TAIL, len(outcome.lines))} of {len(outcome.lines)} turns:\n{tail}\n"
        f"replay: {COMMAND} --seed {outcome.seed} --trace"
    )
