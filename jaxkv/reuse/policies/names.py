"""Policies by name: what `str(policy)` writes is read back as the same value."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable

from jaxkv.errors import ConfigError, nearest
from jaxkv.reuse.policies.base import Policy
from jaxkv.reuse.policies.budget import Budget
from jaxkv.reuse.policies.dependents import Dependents
from jaxkv.reuse.policies.erratum import Erratum
from jaxkv.reuse.policies.exact import Drop, Exact
from jaxkv.reuse.policies.first_k import FirstK
from jaxkv.reuse.policies.forget import Forget
from jaxkv.reuse.policies.scr import SCR, NoRotation, Repair
from jaxkv.reuse.policies.sinks import Sinks
from jaxkv.reuse.policies.top_deviation import TopDeviation

_SIZES = ("form", "max_spans", "min_span", "tail")
_WORDS = ("form", "states")  # arguments that are no numbers
# Name to constructor and the arguments that a name may carry, in order.
POLICIES: dict[str, tuple[Callable[..., Policy], tuple[str, ...]]] = {
    "exact": (Exact, ()),
    "drop": (Drop, ()),
    "no_rotation": (NoRotation, _SIZES),
    "scr": (SCR, (*_SIZES, "states")),
    "first_k": (FirstK, ("k",)),
    "sinks": (Sinks, ("s",)),
    "top_deviation": (TopDeviation, ("ratio", "layer")),
    "dependents": (Dependents, ("window", "most")),
    "erratum": (Erratum, ("quote",)),
    "budget": (Budget, ("eps",)),
    "forget": (Forget, ()),
}
_FORM = re.compile(r"([\w.:]+)\s*(?:\(([^()]*)\))?", re.ASCII)
_WHOLE = re.compile(r"-?[0-9]{1,9}")
_NUMBER = re.compile(r"[0-9]{0,9}(?:\.[0-9]{1,17})?(?:e-?[0-9]{1,2})?")


def policy_from_name(text: str) -> Policy:
    """Reads what `str(policy)` writes: "exact", "scr(form=copy)", "scr|first_k(32)|sinks(4)".

    A policy or repair of one's own is named by where it is defined: "my_module:MyRepair(3)", or
    "scr|my_module:MyRepair(3)". The module must be importable; its arguments are numbers.

    Raises:
      ConfigError: an unknown policy, argument or value.
    """
    policies = [_parse_one(part.strip()) for part in text.split("|")]
    result = policies[0]
    for other in policies[1:]:
        if not isinstance(result, SCR | Repair) or not isinstance(other, Repair):
            raise ConfigError(f"policy '{text}' combines what does not combine, expected scr|repair|…")
        result = result | other
    return result


def _parse_one(text: str) -> Policy:
    match = _FORM.fullmatch(text)
    name = match[1] if match else text.partition("(")[0]
    make, allowed = _imported(name) if ":" in name else POLICIES.get(name, (None, ()))
    if make is None:
        known = list(POLICIES)
        raise ConfigError(
            f"policy '{name}' is unknown, expected one of {', '.join(known)}{nearest(name, known)}"
        )
    if match is None:
        raise ConfigError(
            f"policy '{text}' is malformed, expected {name}, or its arguments in one parenthesis"
        )
    arguments: dict[str, int | float | str] = {}
    parts = [part.strip() for part in (match[2] or "").split(",")] if match[2] else []
    for number, part in enumerate(parts):
        key, equals, value = (piece.strip() for piece in part.rpartition("="))
        if not equals:
            key = allowed[number] if number < len(allowed) else ""
        if key not in allowed or key in arguments:
            expected = ", ".join(allowed) or "none"
            raise ConfigError(f"policy '{text}' has argument '{part}', expected arguments: {expected}")
        if key in _WORDS:
            arguments[key] = value
        elif _WHOLE.fullmatch(value):
            arguments[key] = int(value)
        elif value and _NUMBER.fullmatch(value):
            arguments[key] = float(value)
        else:
            raise ConfigError(f"policy '{text}' has {key} '{value}', expected arguments that are numbers")
    return make(**arguments)


def _imported(name: str) -> tuple[Callable[..., Policy] | None, tuple[str, ...]]:
    """The class that "module:Class" names, and its fields."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"policy '{name}' can't be imported: {error}") from None
    fields = tuple(getattr(found, "__dataclass_fields__", ()))
    if not isinstance(found, type) or not hasattr(found, "select"):
        raise ConfigError(f"policy '{name}' is {found!r}, expected a policy's class")
    return found, fields
