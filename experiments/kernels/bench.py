"""One measurement: a case under a candidate, right first, then timed."""

from __future__ import annotations

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments.kernels import candidates, problem, timing
from experiments.kernels.candidates import Skipped
from experiments.kernels.config import KernelsConfig
from experiments.kernels.sweep import Moves
from pallas_kernels import shapes

# Largest error of an answer, as in docs/numerics.md. A relocated key is rounded once.
TOLERANCE = {"bfloat16": 2e-2, "float32": 2e-6}
KEY_TOLERANCE = {"bfloat16": 2.0**-6, "float32": 1e-5}


@dataclasses.dataclass(kw_only=True)
class Row:
    """One line of the results. Times are seconds, rates a second."""

    case: str
    kernel: str  # "decode", "prefill", "relocate" or "copy"
    candidate: str
    status: str = "ok"  # "ok", "wrong", "skipped" or "failed"
    reason: str = ""
    error: float | None = None  # largest absolute error against float64
    seconds: float | None = None  # median of the samples
    spread: float | None = None  # half the distance between their quartiles
    bytes: int = 0  # keys and values that must move
    flops: int = 0
    bytes_per_second: float | None = None
    of_copy: float | None = None  # share of the copy's bytes a second in the same run
    flops_per_second: float | None = None

    def timed(self, values: list[float], ceiling: float | None) -> Row:
        """Enters timings."""
        self.seconds, self.spread = timing.spread(values)
        self.bytes_per_second = self.bytes / self.seconds
        self.flops_per_second = self.flops / self.seconds
        self.of_copy = None if ceiling is None else self.bytes_per_second / ceiling
        return self


def copy_row(size: int, config: KernelsConfig, name: str) -> Row:
    """A copy: `size` bytes read and as many written. The ceiling of everything that streams."""
    row = Row(case=name, kernel="copy", candidate="copy", bytes=2 * size)
    state = jnp.zeros(max(size // 4, 1), jnp.int32)
    values = timing.seconds_per_call(
        lambda x: x + 1, state, samples=config.samples, sample_ms=config.sample_ms
    )
    return row.timed(values, None)


def attention_rows(case: shapes.Case, config: KernelsConfig, platform: str, ceiling: float) -> list[Row]:
    """All candidates on one case."""
    kernel = "decode" if case.length == 1 else "prefill"
    rows = [
        Row(case=case.name, kernel=kernel, candidate=name, bytes=case.kv_bytes, flops=case.flops)
        for name in config.candidates
    ]
    try:
        wanted = problem.problem(case, config.seed)
    except Exception as failure:  # the pages do not fit, say; the next case may
        return [dataclasses.replace(row, status="failed", reason=_line(failure)) for row in rows]
    for number, row in enumerate(rows):
        name = row.candidate
        try:
            if name == "copy":
                copied = copy_row(case.kv_bytes // 2, config, case.name)
                share = (copied.bytes_per_second or 0.0) / ceiling
                rows[number] = dataclasses.replace(copied, kernel=kernel, of_copy=share)
            elif name == "sdpa":
                _torch(row, wanted, config, platform, ceiling)
            else:
                _attention(row, wanted, name, config, platform, ceiling)
        except (Skipped, NotImplementedError) as refusal:
            row.status, row.reason = "skipped", str(refusal)
        except Exception as failure:  # a baseline may fail in any way, and the others still count
            row.status, row.reason = "failed", _line(failure)
    return rows


def allowed(wanted: problem.Problem) -> float:
    """The largest error of a right answer: of the answers' own size, as means over n keys shrink as 1/√n.

    So does what an answer loses with a part of its keys: against a constant it would pass at long contexts.
    """
    return TOLERANCE[wanted.case.dtype] * min(1.0, float(np.abs(wanted.expected).max()))


def _right(row: Row, error: float, most: float) -> bool:
    """Enters the error; whether the answer may be timed."""
    row.error = error
    if error <= most:  # false of nan
        return True
    row.status, row.reason = "wrong", f"error {error:.2g}, not timed"
    return False


def _attention(
    row: Row, wanted: problem.Problem, name: str, config: KernelsConfig, platform: str, ceiling: float
) -> None:
    call, arrays = candidates.attention(name, wanted, platform)
    if not _right(row, problem.error(jax.jit(call)(*arrays), wanted), allowed(wanted)):
        return
    values = timing.seconds_per_call(
        candidates.chained(call),
        jnp.array(arrays[0], copy=True),
        *arrays[1:],
        samples=config.samples,
        sample_ms=config.sample_ms,
    )
    row.timed(values, ceiling)


def relocation_rows(case: Moves, config: KernelsConfig, platform: str, ceiling: float) -> list[Row]:
    """All candidates that relocate, on one case."""
    rows = []
    for name in config.candidates:
        if name not in ("pallas", "xla"):
            continue
        row = Row(case=case.name, kernel="relocate", candidate=name, bytes=case.kv_bytes, flops=case.flops)
        try:
            _relocation(row, case, name, config, platform, ceiling)
        except (Skipped, NotImplementedError) as refusal:
            row.status, row.reason = "skipped", str(refusal)
        except Exception as failure:
            row.status, row.reason = "failed", _line(failure)
        rows.append(row)
    return rows


def _relocation(
    row: Row, case: Moves, name: str, config: KernelsConfig, platform: str, ceiling: float
) -> None:
    call = candidates.relocation(name, platform)
    wanted = problem.move_problem(case, config.seed)
    kept = np.array([wanted.source[0], wanted.source[-1], wanted.source[-1]])
    before = np.asarray(wanted.kv[jnp.asarray(kept)])
    kv, *rest = wanted.arrays()
    kv = jax.jit(call, donate_argnums=0)(kv, *rest)
    if not _right(row, problem.move_error(before, kv, wanted), KEY_TOLERANCE[case.dtype]):
        return
    values = timing.seconds_per_call(
        call,
        kv,
        *rest,
        samples=config.samples,
        sample_ms=config.sample_ms,
    )
    row.timed(values, ceiling)


def _torch(row: Row, wanted: problem.Problem, config: KernelsConfig, platform: str, ceiling: float) -> None:
    call, torch = candidates.torch_attention(wanted, platform)
    case = wanted.case
    out = call().float().cpu().numpy().reshape(case.batch, 1, case.kv_heads, case.group, case.head_dim)
    if not _right(row, problem.error(out, wanted), allowed(wanted)):
        return
    calls, values = 1, []
    while True:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        taken = time.perf_counter() - begin
        if taken * 1e3 >= config.sample_ms / 2 or calls >= timing.MOST_CALLS:
            values.append(taken / calls)
            if len(values) == config.samples:
                break
        else:
            calls = min(2 * calls, timing.MOST_CALLS)
    row.timed(values, ceiling)


def _line(failure: Exception) -> str:
    text = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {text[0][:300] if text else 'no message'}"
