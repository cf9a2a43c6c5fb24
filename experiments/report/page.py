"""report.html: one self-contained page, plots inline, readable on a phone and in dark mode."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping
from typing import Any

import jinja2
import matplotlib
from matplotlib.figure import Figure

from experiments.report.answer import answer, figure, multiple, spread
from experiments.report.plots import INK, STYLE
from experiments.report.summary import BIN_LABELS, Summary

CAPTIONS = {
    "pareto": "Cost and error of each policy; down and left is better. Bars are 95% bootstrap "
    "intervals over cases. Work is that of all cases, divided by that of exact prefix reuse.",
    "kl_by_position": "Where the edit is. At the head the attention sink changes. A hollow mark "
    "is a KL of 0.",
    "error_by_distance": "Staleness of K and V behind the seam, mean over layers and cases: tokens "
    "close to it have lost most of the past that they attended.",
    "error_by_layer": "Staleness by layer, mean over cases. K and V behind the first seam; "
    "attention outputs of the continuation.",
    "steps": "Error and cost of consecutive edits, mean over cases, a line a policy (and dtype of the pages "
    "where there are several). Keys are compared with what they were when they were computed: a view does "
    "not rewrite them until they stand at too many distances; then they are copied, from as they were born. "
    "A hollow mark is 0.",
    "healing": "Eventually exact: stale tokens are recomputed from left to right, KL on the way; the last "
    "point is an exact sequence.",
    "recovery": "Items that exact answers right and the model alone does not. 1 is the margin of exact, 0 "
    "that of scr without repair; a ratio of sums over items. What is beyond -1 or 2 stands at the edge; "
    "where scr loses nothing there is no point.",
    "first_token": "Wall clock, compilation excluded; of several edits, those that were measured. Exact "
    "reuses the common prefix.",
}


def render_page(summary: Summary, document: dict[str, Any], figures: dict[str, Figure]) -> str:
    """The page of one run; `document` is the contents of `config.json`."""
    config = document["config"]
    causes = list(dict.fromkeys(c for row in summary.flops_by_cause.values() for c in row))
    return render(
        "page.html",
        heading=(config["workload"], config["name"], document["created"][:10]),
        answer=answer(summary, document["model"]["name"]),
        setting=setting_of(document),
        summary=summary,
        document=document,
        causes=causes,
        bins=BIN_LABELS,
        plots=[(name, CAPTIONS[name], inline_svg(name, fig)) for name, fig in figures.items()],
    )


def render(template: str, **values: Any) -> str:
    """A page of this package: `base.html` is the head and the end of each.

    Args:
      template: a file name beside this module.
      values: what it shows; all pages need `heading` (texts), `answer` (a sentence) and `setting`
        (terms and texts).
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("experiments.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        kl=figure,
        spread=spread,
        count=lambda x: "–" if math.isnan(x) else f"{x:,.0f}",
        share=lambda x: "–" if math.isnan(x) else f"{x:.1%}",
        fixed=lambda x, digits=2: "–" if math.isnan(x) else f"{x:.{digits}f}",
        signed=signed,
        times=multiple,
        plain=lambda x: "–" if math.isnan(x) else f"{x:.3g}",
        known=lambda rows, name: any(not math.isnan(getattr(r, name)) for r in rows),
        relative=relative,
        isnan=math.isnan,
        flops=lambda x: f"{x:.2e}",
    )
    return environment.get_template(template).render(**values)


def setting_of(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Terms and texts of what a run ran on: model, corpus, environment, config."""
    model, corpus = document["model"], document["corpus"]
    config = [f"{k}={show(v)}" for k, v in document["config"].items() if not isinstance(v, Mapping)]
    return [
        (
            "model",
            f"{model['name']}, {model['dtype']}, {model['num_layers']} layers; weights "
            f"{model['weights_digest'][:16]}",
        ),
        ("corpus", f"{corpus['name']}, {corpus['tokens']:,} tokens; SHA-256 {corpus['sha256'][:16]}"),
        *((name, str(value)) for name, value in document["environment"].items()),
        ("config", " · ".join(config)),
    ]


def show(value: Any) -> str:
    """A config's value as one types it."""
    return ",".join(str(x) for x in value) if isinstance(value, list | tuple) else str(value)


def inline_svg(name: str, plot: Figure) -> str:
    """`plot` as an SVG element that takes the page's text colour and shares no id with another."""
    out = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        plot.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]  # no XML prolog, no document type
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = text.replace(INK, "currentColor")
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    text = text.replace("url(#", f"url(#{name}-")
    # The page scales the plot: no fixed size.
    text = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", text, count=1)
    return text.replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)


def relative(value: float) -> str:
    """A share of exact's work."""
    if math.isnan(value):
        return "–"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def signed(value: float) -> str:
    """A difference: two digits and its sign."""
    return "–" if math.isnan(value) else f"{value:+.2g}"
