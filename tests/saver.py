"""Saves a cache again and again until it is killed.

    python saver.py SOURCE TARGET [hybrid]

Loads SOURCE, says "saving", and saves to TARGET in a loop.
"""

from __future__ import annotations

import sys

from tiny import CHUNK, NUM_PAGES, PAGE_SIZE, make_model, tiny_config
from tiny_hybrid import hybrid_model

import jaxkv


def save_for_ever(source: str, target: str, kind: str = "") -> None:
    model = hybrid_model() if kind == "hybrid" else make_model(tiny_config())
    engine = jaxkv.Engine(model, num_pages=NUM_PAGES, page_size=PAGE_SIZE, chunk_size=CHUNK)
    engine.load_cache(source)
    print("saving", flush=True)
    while True:
        engine.save_cache(target)


if __name__ == "__main__":
    save_for_ever(*sys.argv[1:])
