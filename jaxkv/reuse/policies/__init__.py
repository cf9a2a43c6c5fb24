"""What becomes of a cached sequence when its tokens change. A policy is a value; `plan` applies it.

A policy looks at an `Edit` and answers with a `Selection`: which surviving spans to keep and which
positions to recompute although they survived. To add one: a frozen dataclass with `select`, or a
`Repair` with `positions`; `docs/policies.md` shows both.

    SCR() | FirstK(32) | Sinks(4)        # keep spans, repair behind every seam, renew the sink
"""

from jaxkv.reuse.policies.base import Edit, Form, Policy, Selection
from jaxkv.reuse.policies.budget import Budget
from jaxkv.reuse.policies.dependents import Dependents
from jaxkv.reuse.policies.erratum import Erratum
from jaxkv.reuse.policies.exact import Drop, Exact
from jaxkv.reuse.policies.first_k import FirstK
from jaxkv.reuse.policies.forget import Forget
from jaxkv.reuse.policies.names import POLICIES, policy_from_name
from jaxkv.reuse.policies.scr import SCR, Composed, NoRotation, Repair
from jaxkv.reuse.policies.sinks import Sinks
from jaxkv.reuse.policies.top_deviation import TopDeviation

__all__ = [
    "POLICIES",
    "SCR",
    "Budget",
    "Composed",
    "Dependents",
    "Drop",
    "Edit",
    "Erratum",
    "Exact",
    "FirstK",
    "Forget",
    "Form",
    "NoRotation",
    "Policy",
    "Repair",
    "Selection",
    "Sinks",
    "TopDeviation",
    "policy_from_name",
]
