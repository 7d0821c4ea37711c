"""Shows an explanation: the choice on top, then adaptations and refusals."""

from __future__ import annotations

from collections.abc import Sequence

from switchax.dispatch import Candidate
from switchax.errors import Refusal
from switchax.explanation import Explanation

from .output import show_line, show_table

__all__ = ["show_explanation"]


def show_explanation(answer: Explanation) -> None:
    """Writes the choice, what it takes, and a row for every refusal."""
    show_line(answer.request.describe())
    chosen = next(
        (c for c in answer.candidates if c.entry.qualified == answer.chosen), None
    )
    if chosen is None:
        show_line(f"on {answer.target}: no operation", "bold red")
        for line in answer.error.splitlines():
            if not line.startswith(" "):  # those are in the table
                show_line(line)
    else:
        text = f"on {answer.target}: {answer.chosen} ({chosen.cost})"
        show_line(text, "bold green")
    for refusal in answer.common:
        show_line(f"every candidate refuses {refusal}", "red")
    show_line()
    _show_adaptations(answer, chosen)
    ranked = sorted(
        answer.candidates, key=lambda c: (c is not chosen, bool(c.refusals), c.cost)
    )
    rows = [row for c in ranked for row in _rows(c, answer, c is chosen)]
    if rows:
        columns = ("operation", "cost", "verdict", "field", "actual", "allowed", "hint")
        show_table(columns, rows)
    for text in answer.not_loaded:
        show_line(f"not loaded: {text}", "yellow")


def _show_adaptations(answer: Explanation, chosen: Candidate | None) -> None:
    """Writes what core changes for the operations that honour the call."""
    honouring = [c for c in answer.candidates if not c.refusals]
    ranked: Sequence[Candidate] = sorted(honouring, key=lambda c: c is not chosen)
    rows = [
        (c.entry.qualified, step.name, step.detail, step.cost)
        for c in ranked
        for step in c.plan.adaptations
    ]
    if rows:
        show_table(("operation", "adaptation", "what", "at the cost of"), rows)
        show_line()


def _rows(
    candidate: Candidate, answer: Explanation, is_chosen: bool
) -> list[tuple[str, ...]]:
    verdict = "refuses" if candidate.refusals else "honours"
    head = (candidate.entry.qualified, str(candidate.cost))
    if is_chosen:
        return [(*head, "chosen", "", "", "", "")]
    own = answer.own_refusals(candidate)
    if not own:
        return [(*head, verdict, "", "", "", _hint(candidate, answer))]
    return [(*head, verdict, *_cells(refusal)) for refusal in own]


def _hint(candidate: Candidate, answer: Explanation) -> str:
    if candidate.refusals:
        return "see above"
    capabilities = candidate.entry.operation.capabilities
    if capabilities.is_experimental(answer.target.platform):
        return "experimental: only when named"
    return ""


def _cells(refusal: Refusal) -> tuple[str, ...]:
    return refusal.field, refusal.actual, refusal.allowed, refusal.hint
