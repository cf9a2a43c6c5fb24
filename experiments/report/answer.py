"""The one sentence that a report leads with. It follows the figures, whatever they are."""

from __future__ import annotations

import math

from experiments.config import TINY_MODEL
from experiments.report.summary import PolicyRow, Summary

CONTROLS = ("drop", "no_rotation")  # they show what goes wrong; nobody would choose them
_FAILS = 0.05  # nats per token: from here on the text visibly changes


def answer(summary: Summary, model: str) -> str:
    """One sentence: which policy is worth it, what it costs and saves, where plain reuse fails."""
    if not summary.rows:
        count = len(summary.failures)
        return f"No case finished: all {count} measurements failed." if count else "No case was run."
    on = f"On {model}"
    hero = _best(summary)
    if hero is None:
        exact = summary.rows[0]
        return (
            f"{on}, only exact policies and controls ran: exact needs {exact.ttft_ms:,.0f} ms to "
            f"the first token after an edit, at mean KL {figure(exact.kl)} nats{_noise(exact)}."
        )
    if math.isnan(hero.flops_relative):
        return (
            f"{on}, no cost can be compared: exact did not finish; {describe(hero.policy)} has mean KL "
            f"{figure(hero.kl)} nats{_noise(hero)}."
        )
    cheap = (
        f"{on}, {describe(hero.policy)} answers after an edit {_times(1 / hero.flops_relative)} "
        f"{'cheaper' if hero.flops_relative < 1 else 'dearer'} than exact prefix reuse "
        f"({hero.speedup:.1f}× its speed to the first token) at mean KL {figure(hero.kl)} nats"
        f"{_noise(hero)}, top-1 {hero.top1:.1%}"
        if hero.flops_relative > 0
        else f"{on}, {describe(hero.policy)} computes nothing"
    )
    sentence = cheap + _unrepaired(summary, hero)
    if model.startswith(TINY_MODEL):
        sentence = f"Smoke run with random weights, so the figures mean nothing beyond it: {sentence}"
    return sentence + "."


def describe(policy: str) -> str:
    """A policy's name as one says it."""
    repairs = [words for part in policy.split("|") if (words := _repair(part))]
    if repairs:
        return f"Suffix Cache Reuse that repairs {' and '.join(repairs)} ({policy})"
    if policy.startswith("scr"):
        return f"Suffix Cache Reuse without repair ({policy})"
    if policy.startswith("budget"):
        return f"the policy that climbs until its predicted error fits ({policy})"
    return policy


def _repair(part: str) -> str:
    """What one repair of a policy's name recomputes; "" for anything else."""
    name, _, arguments = part.rstrip(")").partition("(")
    values = arguments.split(",")
    try:
        if name == "first_k":
            return f"the first {values[0]} tokens behind each seam"
        if name == "sinks":
            return f"the first {values[0]} sinks"
        if name == "top_deviation":
            return f"the {float(values[0]):.0%} that deviate most at layer {values[1]}"
        if name == "dependents":
            return (
                f"the first {values[0]} tokens behind each seam and the {values[1]} that attend the edit most"
            )
    except (IndexError, ValueError):
        pass
    return ""


def figure(value: float) -> str:
    """A KL as text: three digits, no exponent where none is needed."""
    if math.isnan(value):
        return "–"
    if value == 0:
        return "0"
    if abs(value) >= 1e-4:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def multiple(value: float) -> str:
    """A multiple of the noise floor."""
    if math.isnan(value):
        return "–"
    if value >= 1e5:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}×"
    return f"{value:,.0f}×" if value >= 10 else f"{value:.2g}×"


def spread(value: float) -> str:
    """A standard error as text: one digit."""
    if math.isnan(value):
        return "–"
    if value >= 10:
        return f"{value:,.0f}"
    return f"{value:.1g}" if value == 0 or 1e-3 <= value < 10 else f"{value:.0e}".replace("e-0", "e-")


def _best(summary: Summary) -> PolicyRow | None:
    """The approximate policy of the lowest KL among those that save work; never a control."""
    candidates = [
        r
        for r in summary.rows
        if r.kind == "approximate"
        and r.policy.split("(")[0] not in CONTROLS
        and "form=composed" not in r.policy
    ]
    # `forget` counts as approximate where it relocates what no deletion touched. It costs about
    # what exact costs, and such a policy doesn't say what reuse buys.
    cheap = [r for r in candidates if r.flops_relative <= 0.5]
    return min(cheap or candidates, key=lambda r: r.kl, default=None)


def _unrepaired(summary: Summary, hero: PolicyRow) -> str:
    plain = next((r for r in summary.rows if r.policy.split("(")[0] == "scr" and "|" not in r.policy), None)
    if plain is None or plain.policy == hero.policy:
        return ""
    head = summary.by_position.get(plain.policy, {}).get("head")
    hero_head = summary.by_position.get(hero.policy, {}).get("head")
    if head is None or hero_head is None:
        return f"; without repair the KL is {figure(plain.kl)}"
    if head >= _FAILS and head >= 10 * hero_head:
        return (
            f"; without repair it fails when the head of the context is edited (KL {figure(head)}, "
            f"with repair {figure(hero_head)})"
        )
    if head >= _FAILS:
        return (
            f"; when the head of the context is edited both fail (KL {figure(head)} without "
            f"repair, {figure(hero_head)} with)"
        )
    return f"; without repair the KL is {figure(plain.kl)}, {figure(head)} when the head is edited"


def _noise(row: PolicyRow) -> str:
    known = not math.isnan(row.noise_multiple)
    return f" ({multiple(row.noise_multiple)} the noise floor)" if known else ""


def _times(value: float) -> str:
    value = value if value >= 1 else 1 / value
    return f"{value:.0f}×" if value >= 10 else f"{value:.1f}×"
