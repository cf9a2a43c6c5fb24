"""jaxkv: reuse of transformer KV state in JAX, exact where it can be and measured where it is not.

    model = jaxkv.load("smollm2-135m")
    engine = jaxkv.Engine(model, num_pages=1024)
    first = engine.prefill(tokens)
    edited = engine.edit(first.sequence, new_tokens, jaxkv.SCR() | jaxkv.FirstK(32))
    print(edited.reuse.kind, edited.reuse.ledger)

Beneath `Engine` the pure functions work without it: `prefill`, `decode`, `decode_many`, `relocate`,
`forward_dense` on values of `KVPages`, `PageTable` and `StepInput`.
"""

from jaxkv.cache.contract import CacheContract
from jaxkv.cache.domain import Domain
from jaxkv.cache.dtypes import kv_token_bytes
from jaxkv.cache.eviction import LFU, LRU, TTL, CostPerByte, EvictionPolicy, Priority
from jaxkv.cache.match import Cause, Match, MatchEnd
from jaxkv.cache.pages import KVPages, make_pages
from jaxkv.cache.pool import PagePool
from jaxkv.cache.prefix import PrefixIndex
from jaxkv.cache.sequence import Origin, Removed, Run, Sequence
from jaxkv.cache.states import StatePool, make_states
from jaxkv.cache.table import GroupInput, PageTable, StateInput, StepInput, build_table
from jaxkv.cache.tree import Pin
from jaxkv.divergence import Divergence, divergence, layer_divergence
from jaxkv.engine import Engine
from jaxkv.errors import (
    CapacityError,
    ConfigError,
    ContractError,
    FetchError,
    FormatError,
    HandleError,
    JaxkvError,
    ProcessError,
    RelocationError,
    TokenError,
)
from jaxkv.generation import Sampling
from jaxkv.io.compilation import enable_compilation_cache
from jaxkv.io.models import Model, load
from jaxkv.model.config import ModelConfig, RecurrentConfig, RopeConfig
from jaxkv.model.params import Params, init_params, params_digest
from jaxkv.model.transformer import forward_dense
from jaxkv.parallel import parse_mesh
from jaxkv.persistence import CacheLoaded, CacheSaved
from jaxkv.replicas import Replicas
from jaxkv.results import Generation, KVState, Reuse, StepResult
from jaxkv.reuse.diff import Span, diff
from jaxkv.reuse.estimate import Calibration, Estimate, Signals
from jaxkv.reuse.ledger import Ledger, prefix_reuse_flops
from jaxkv.reuse.plan import ReusePlan, plan
from jaxkv.reuse.policies import (
    SCR,
    Budget,
    Composed,
    Dependents,
    Drop,
    Edit,
    Erratum,
    Exact,
    FirstK,
    Forget,
    NoRotation,
    Policy,
    Repair,
    Selection,
    Sinks,
    TopDeviation,
    policy_from_name,
)
from jaxkv.reuse.probes import Attention, Deviation, Encoded, Trial
from jaxkv.serving.clock import Clock, ManualClock, WallClock
from jaxkv.serving.request import Request, RequestMetrics, RequestResult, Round, ServingConfig
from jaxkv.steps import DecodeInput, Moves, decode, decode_many, prefill, relocate

__version__ = "0.1.0"

__all__ = [
    "LFU",
    "LRU",
    "SCR",
    "TTL",
    "Attention",
    "Budget",
    "CacheContract",
    "CacheLoaded",
    "CacheSaved",
    "Calibration",
    "CapacityError",
    "Cause",
    "Clock",
    "Composed",
    "ConfigError",
    "ContractError",
    "CostPerByte",
    "DecodeInput",
    "Dependents",
    "Deviation",
    "Divergence",
    "Domain",
    "Drop",
    "Edit",
    "Encoded",
    "Engine",
    "Erratum",
    "Estimate",
    "EvictionPolicy",
    "Exact",
    "FetchError",
    "FirstK",
    "Forget",
    "FormatError",
    "Generation",
    "GroupInput",
    "HandleError",
    "JaxkvError",
    "KVPages",
    "KVState",
    "Ledger",
    "ManualClock",
    "Match",
    "MatchEnd",
    "Model",
    "ModelConfig",
    "Moves",
    "NoRotation",
    "Origin",
    "PagePool",
    "PageTable",
    "Params",
    "Pin",
    "Policy",
    "PrefixIndex",
    "Priority",
    "ProcessError",
    "RecurrentConfig",
    "RelocationError",
    "Removed",
    "Repair",
    "Replicas",
    "Request",
    "RequestMetrics",
    "RequestResult",
    "Reuse",
    "ReusePlan",
    "RopeConfig",
    "Round",
    "Run",
    "Sampling",
    "Selection",
    "Sequence",
    "ServingConfig",
    "Signals",
    "Sinks",
    "Span",
    "StateInput",
    "StatePool",
    "StepInput",
    "StepResult",
    "TokenError",
    "TopDeviation",
    "Trial",
    "WallClock",
    "build_table",
    "decode",
    "decode_many",
    "diff",
    "divergence",
    "enable_compilation_cache",
    "forward_dense",
    "init_params",
    "kv_token_bytes",
    "layer_divergence",
    "load",
    "make_pages",
    "make_states",
    "params_digest",
    "parse_mesh",
    "plan",
    "policy_from_name",
    "prefill",
    "prefix_reuse_flops",
    "relocate",
]
