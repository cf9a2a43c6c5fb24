"""docs/scale.md, from plans, compiled programs and simulated routes."""

from __future__ import annotations

import dataclasses
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.kernels.chips import CHIPS
from experiments.scale.machines import MACHINES, SOURCES, SUBJECTS, Machine, Subject
from experiments.scale.plan import Layout, Load, Plan, plan
from experiments.scale.routing import Routed, Traffic

CONTEXT, PAGE_SIZE = 4096, 16
PER_DEVICE = 4  # sequences, so that layouts of one machine do the same work
KEPT_FIELDS = ("subject", "model", "layers", "batch", "context", "page_size")
FEW_LAYERS = 4  # that are compiled: layers are alike, so few of them show what one costs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the plan."""

    machine: Machine
    subject: Subject
    layout: Layout
    load: Load

    @property
    def case(self) -> dict[str, Any]:
        """What `experiments.scale.compiled` is asked."""
        return {
            "subject": self.subject.name,
            "model": self.layout.model,
            "layers": self.layers,
            "batch": self.load.batch,
            "context": self.load.context,
            "page_size": PAGE_SIZE,
        }

    @property
    def layers(self) -> int:
        """How many layers are compiled."""
        return min(self.subject.config.num_layers, FEW_LAYERS)

    @property
    def compiled_part(self) -> Subject:
        """What is compiled, and nothing on paper."""
        config = dataclasses.replace(self.subject.config, num_layers=self.layers)
        return Subject(name=self.subject.name, config=config)

    @property
    def plan(self) -> Plan:
        """Its figures by formula."""
        return plan(self.subject, self.layout, self.load)


def rows() -> list[Row]:
    """All lines: each model on each machine, in the layouts that come into question."""
    found = []
    for machine in MACHINES:
        local = machine.devices // machine.hosts
        for subject in SUBJECTS:
            sizes = {1 if subject.config.num_kv_heads % 4 else 4, local, machine.devices}
            for size in sorted(sizes):
                layout = Layout(data=machine.devices // size, model=size)
                load = Load(batch=PER_DEVICE * size, context=CONTEXT)
                found.append(Row(machine=machine, subject=subject, layout=layout, load=load))
    return found


def key(topology: str, case: Mapping[str, Any]) -> str:
    """Names a compiled program."""
    return "/".join([topology, *(str(case[name]) for name in KEPT_FIELDS)])


def render(programs: Mapping[str, Any], routed: Sequence[Routed], traffic: Traffic, versions: str) -> str:
    """The page as Markdown."""
    text = [_INTRODUCTION, "## Machines", "", *_machines(), "", *_wrap(SOURCES), ""]
    text += ["## A decode step", "", *_wrap(_COLUMNS), "", *_plans(rows()), "", *_wrap(_reading()), ""]
    text += [
        "## Compiled programs",
        "",
        _COMPILED,
        "",
        *_programs(programs),
        "",
        f"Compilers: {versions}.",
        "",
    ]
    text += ["## Routing among replicas", "", _routing(traffic), "", *_routes(routed), ""]
    return "\n".join([*text, *_wrap(_findings(routed)), ""])


def _machines() -> list[str]:
    lines = [
        "| machine | devices | HBM a device | HBM rate | ring, sent a device | to another host |",
        "|---|---|---|---|---|---|",
    ]
    for m in MACHINES:
        cross = "–" if m.hosts == 1 else f"{(m.cross_rate or m.link_rate) / 1e9:,.0f} GB/s"
        lines.append(
            f"| {m.name} ({CHIPS[m.chip].name}) | {m.devices} | {m.hbm_bytes / 1e9:,.0f} GB "
            f"| {m.bandwidth / 1e9:,.0f} GB/s | {m.link_rate / 1e9:,.0f} GB/s | {cross} |"
        )
    return lines


def _plans(every: list[Row]) -> list[str]:
    lines = [
        "| machine | model | layout | weights | pages | state | in HBM | collectives | sent | HBM | link "
        "| hops | tokens/s at most |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in every:
        found, machine = row.plan, row.machine
        kinds = Counter(each.kind for each in found.collectives)
        named = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none"
        share = found.memory / machine.hbm_bytes
        times = (
            found.hbm_seconds(machine),
            found.link_seconds(machine, row.layout),
            found.hop_seconds(machine, row.layout),
        )
        hbm, link, hops = (f"{1e3 * seconds:,.2f}" for seconds in times)
        rate = f"{row.load.batch * row.layout.data / sum(times):,.0f}" if share < 1 else "does not fit"
        lines.append(
            f"| {machine.name} | {row.subject.name} | {row.layout} | {found.weights / 1e9:,.2f} "
            f"| {found.kv / 1e9:,.2f} | {found.state / 1e9:,.2f} | {share:.0%} | {named} "
            f"| {found.link_bytes(row.layout) / 1e6:,.2f} | {hbm} | {link} | {hops} | {rate} |"
        )
    return lines


def _programs(programs: Mapping[str, Any]) -> list[str]:
    lines = [
        "| topology | model | layers | model axis | collectives: compiled | by formula "
        "| sent: compiled | by formula "
        "| held: compiled | by formula | pages in place | temporary |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    seen = set()
    for row in rows():
        name = key(row.machine.topology, row.case)
        found = programs.get(name)
        if not row.machine.topology or found is None or name in seen:
            continue
        seen.add(name)
        lines.append(_program(row, found))
    return lines


def _program(row: Row, found: Mapping[str, Any]) -> str:
    from experiments.collectives import Collective

    formula = plan(row.compiled_part, row.layout, row.load)
    layers = f"{row.layers} of {row.subject.config.num_layers}"
    start = f"| {row.machine.topology} | {row.subject.name} | {layers} | {row.layout.model} "
    if "error" in found:
        return start + f"| not compiled: {found['error'][:120]} | | | | | | | |"
    compiled = [Collective(kind, nbytes) for kind, nbytes in found["collectives"]]
    cells = []
    for each in (compiled, formula.collectives):
        kinds = Counter(c.kind for c in each)
        cells.append(", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())) or "none")
    sent = [sum(c.link_bytes(row.layout.model) for c in each) for each in (compiled, formula.collectives)]
    place = "yes" if found["in_place"] >= formula.kv else "no"
    return start + (
        f"| {cells[0]} | {cells[1]} | {sent[0] / 1e6:,.2f} MB | {sent[1] / 1e6:,.2f} MB "
        f"| {found['arguments'] / 1e9:,.3f} GB | {formula.memory / 1e9:,.3f} GB | {place} "
        f"| {found['temporary'] / 1e6:,.1f} MB |"
    )


def _routes(routed: Sequence[Routed]) -> list[str]:
    lines = [
        "| replicas | route | prompt tokens found | busiest over mean | wait, mean | wait, 95% |",
        "|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {r.replicas} | {r.route} | {r.hit_rate:.1%} | {r.imbalance:.2f} | {r.wait_mean:.2f} s "
        f"| {r.wait_p95:.2f} s |"
        for r in routed
    ]


def _routing(traffic: Traffic) -> str:
    text = (
        f"The requests of `prefix_trace` (tenants {traffic.tenants}, system prompts {traffic.systems}, "
        f"templates {traffic.templates} under each, a quarter of the requests follow-ups), "
        f"{traffic.requests} a replica, arriving at {traffic.load:.0%} of what the replicas could compute "
        f"if they found nothing ({traffic.rate:,.0f} prompt tokens a second each). Each replica has the "
        f"library's own pool of {traffic.num_pages:,} pages of {traffic.page_size}, prefix index and LRU "
        "eviction; no model runs. `longest_match` takes the replica that has most of the prompt, "
        "`least_work` the one that would be done first if what it has of the prompt is not computed "
        "again (`jaxkv.serving.routing`)."
    )
    return "\n".join(_wrap(text))


def _findings(routed: Sequence[Routed]) -> str:
    most = max((r.replicas for r in routed), default=0)
    of = {r.route: r for r in routed if r.replicas == most}
    if len(of) < 4:
        return ""
    match, least, turn, dice = (of[n] for n in ("longest_match", "least_work", "round_robin", "random"))
    return (
        f"At {most} replicas the longest match finds {match.hit_rate:.1%} of the prompt tokens, the least "
        f"work {least.hit_rate:.1%}, round robin {turn.hit_rate:.1%}, random {dice.hit_rate:.1%}. The "
        f"longest match alone leaves the busiest replica with {match.imbalance:.1f} times the mean work "
        f"and a mean wait of {match.wait_mean:.2f} s; the least work has {least.imbalance:.2f} times and "
        f"{least.wait_mean:.2f} s, round robin {turn.imbalance:.2f} times and {turn.wait_mean:.2f} s."
    )


def _reading() -> str:
    every = {(r.machine.name, r.subject.name, str(r.layout)): r for r in rows()}
    one = every["v5e-8", "Llama-3-8B", "data:1,model:8"]
    logits = one.plan.collectives[-1]
    share = logits.link_bytes(8) / one.plan.link_bytes(one.layout)
    return (
        "Read with care: HBM, link and hop times are added, because a product needs the sum before it, "
        "and nothing else is counted (no arithmetic, no dispatch). At these batches the hops are the "
        "larger part of a step on a small model: SmolLM2 belongs on replicas of one device. The logits "
        "are gathered in float32 because a token is drawn from all of them; of Llama-3-8B's bytes on "
        f"v5e-8 that is {share:.0%}. Where the axis does not divide K (Qwen3.6's 4 KV heads over 8, "
        "Llama's 8 over 16), each device holds the pages of all heads, and a layout with more replicas "
        "needs less memory."
    )


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), 110)


_INTRODUCTION = """# Beyond these machines

Made by `python -m experiments.scale`; nothing here was measured on these machines. How to run on several
devices is in [parallel.md](parallel.md).
"""
_COLUMNS = f"""One token for each of {PER_DEVICE} sequences a device at context {CONTEXT:,}, weights and
pages in bfloat16, by formula (`experiments/scale/plan.py`), checked against compiled programs below. Per
device: GB of weights, pages and recurrent state, and their share of HBM; the step's collectives and the MB
that a device sends for them in a ring; milliseconds at the HBM's rate, at the link's rate, and for the hops
of the rings at 1 µs each, which is an assumption. Of Qwen3.6-27B the 16 layers that attend are what
compiles; the weights, states and all-reduces of its 48 recurrent layers are counted on paper and are part
of these figures, as if they were split over heads and MLP like the others."""
_COMPILED = """What XLA makes of `jaxkv`'s own decode step, with its Pallas kernels under `shard_map`, for
TPU topologies that are not here: the collectives in the program, the bytes that a device takes (weights,
pages, tables), whether pages are written in place, and what it allocates beside them. Both columns count
the layers that were compiled, and of Qwen3.6-27B the attention part alone. H200s are not among them: their
lines above are by formula alone."""
