"""Saves a cache again and again until it is killed, once for each line on standard input.

    python saver.py SOURCE TARGET

A child is forked for each round, before JAX has started anything; it loads SOURCE and saves to TARGET in a
loop. The line says after how many milliseconds of saving it is killed. "dead" is printed when it is.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from tiny import CHUNK, NUM_PAGES, PAGE_SIZE, make_model, tiny_config

import jaxkv


def save_for_ever(source: str, target: str, tell: int) -> None:
    engine = jaxkv.Engine(
        make_model(tiny_config()), num_pages=NUM_PAGES, page_size=PAGE_SIZE, chunk_size=CHUNK
    )
    engine.load_cache(source)
    os.write(tell, b"s")
    while True:
        engine.save_cache(target)


def main() -> None:
    for line in sys.stdin:
        heard, tell = os.pipe()
        child = os.fork()
        if not child:
            save_for_ever(sys.argv[1], sys.argv[2], tell)
        os.close(tell)
        assert os.read(heard, 1) == b"s"
        time.sleep(float(line) / 1000)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(heard)
        print("dead", flush=True)


if __name__ == "__main__":
    main()
