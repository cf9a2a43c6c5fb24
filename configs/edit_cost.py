"""What do appending, editing the middle and editing the start of a context cost, in work and in money?

    python -m experiments.launch --config=configs/edit_cost.py

Runtime: some minutes on two cores, half of them for compiling; with `--config.smoke=True`
(random weights, no download) seconds.

Model and text: SmolLM2-135M-Instruct in float32, 2,000 tokens of Python's reference prose, 200 tokens
appended or replaced, 16 generated; each under exact prefix reuse and under policies that keep the KV behind
the edit. The same three edits on paper for Qwen3.6-27B at 20,000 tokens. Both priced as hosted APIs price
cached input.

Expected (run 2026-11-30): by the ledger an exact edit at the start costs 7.4 times the FLOPs of an append,
one in the middle 4.2 times; with reuse each costs a little less than an append. Prices follow: reading is
nearly free, writing is not, and a rewritten start can cost more than no cache at all.

The prices are data of a day, not truth: change them here, with their date and source.
"""

import ml_collections

from experiments.cost_config import defaults

_DAY = "2026-11-30"


def _figures(**figures: tuple[float, str, bool]) -> dict[str, dict[str, object]]:
    """Figure -> value, date, source and whether the source was read."""
    return {
        name: {"value": value, "date": _DAY, "source": source, "confirmed": confirmed}
        for name, (value, source, confirmed) in figures.items()
    }


_ANTHROPIC = "docs.helicone.ai/gateway/concepts/prompt-caching, which cites Anthropic's pricing"
_ANTHROPIC_DOC = "portkey.ai/docs/aigw/integrations/llms/anthropic/prompt-caching, citing Anthropic"
_ANTHROPIC_OUT = "claudecodeguides.com/claude-prompt-caching-pricing-and-cost-savings"
_OPENAI = "openai.com/index/api-prompt-caching (announcement, by a mirror)"
_OPENAI_BOOK = "openai-cookbook, Prompt_Caching_201.ipynb: up to 90%, for models before GPT-5.6"
_GOOGLE = "docs.cloud.google.com/vertex-ai/generative-ai/docs/context-cache/context-cache-overview"
_UNSAID = "not published as one figure: differs by model"

PRICES = {
    "anthropic 5 min": _figures(
        read=(0.1, _ANTHROPIC, True),
        write=(1.25, _ANTHROPIC, True),
        output=(5.0, _ANTHROPIC_OUT, True),
        minimum=(1024, _ANTHROPIC_DOC + "; more for some models", True),
        step=(1, "no step is published; prefixes end at breakpoints of the caller", False),
        ttl=(300.0, _ANTHROPIC_DOC, True),
    ),
    "anthropic 1 h": _figures(
        read=(0.1, _ANTHROPIC, True),
        write=(2.0, _ANTHROPIC, True),
        output=(5.0, _ANTHROPIC_OUT, True),
        minimum=(1024, _ANTHROPIC_DOC + "; more for some models", True),
        step=(1, "no step is published; prefixes end at breakpoints of the caller", False),
        ttl=(3600.0, _ANTHROPIC_DOC, True),
    ),
    "openai, half": _figures(
        read=(0.5, _OPENAI, True),
        write=(1.0, _OPENAI + ": no fee for writing", True),
        output=(4.0, _UNSAID, False),
        minimum=(1024, _OPENAI, True),
        step=(128, _OPENAI, True),
        ttl=(300.0, _OPENAI + ": 5 to 10 minutes of inactivity, the lower end", True),
    ),
    "openai, tenth": _figures(
        read=(0.1, _OPENAI_BOOK, True),
        write=(1.0, _OPENAI_BOOK, True),
        output=(8.0, _UNSAID, False),
        minimum=(1024, _OPENAI_BOOK, True),
        step=(128, _OPENAI_BOOK, True),
        ttl=(300.0, _OPENAI + ": 5 to 10 minutes of inactivity, the lower end", True),
    ),
    "google implicit": _figures(
        read=(0.1, _GOOGLE + " (75% at its start in 2025)", True),
        write=(1.0, _GOOGLE + ": standard input price", True),
        output=(8.0, _UNSAID, False),
        minimum=(2048, _GOOGLE + "; 4,096 for Gemini 3 by ai.google.dev/gemini-api/docs/caching", True),
        step=(1, "not published", False),
        ttl=(300.0, "not published", False),
    ),
}


def get_config() -> ml_collections.ConfigDict:
    """Every key can be overridden, see `experiments/cost_config.py`."""
    return defaults(
        name="edit_cost",
        model="smollm2-135m",
        context=2000,
        changed=200,
        generated=16,
        policies=("exact", "scr", "first_k(32)"),
        prices=PRICES,
    )
