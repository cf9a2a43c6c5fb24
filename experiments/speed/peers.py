"""Other engines on the same model, each in a process of its own.

    python -m experiments.speed.peers transformers-float32 model.gguf

A peer reads one JSON request a line, `{"prefill": tokens}` or `{"context": n, "decode": steps}`, and
answers with one line of seconds. It imports neither jax nor jaxkv, so it may run in another environment.
`pip install torch transformers gguf accelerate` and `pip install llama-cpp-python` give the peers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from experiments.speed.peak import peak_bytes

PEERS = ("transformers-float32", "transformers-bfloat16", "llama.cpp-float32")
CONTEXT = 4608


class Peer:
    """A running peer. `ask` waits for its answer."""

    def __init__(self, name: str, gguf: str, python: str = "") -> None:
        """Raises RuntimeError, with the peer's last line, if it can't start."""
        self.name = name
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            [python or sys.executable, "-m", "experiments.speed.peers", name, gguf],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root), "TOKENIZERS_PARALLELISM": "false"},
        )
        self.version = str(self._read()["version"])

    def ask(self, **request: int) -> float:
        """Seconds that the request took."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return float(self._read()["seconds"])

    def close(self) -> int:
        """Ends the peer; returns its largest resident memory in bytes."""
        assert self._process.stdin is not None
        self._process.stdin.write("{}\n")
        self._process.stdin.flush()
        peak = int(self._read()["peak_bytes"])
        self._process.stdin.close()
        self._process.wait()
        return peak

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        last = [line for line in self._process.stderr.read().splitlines() if line.strip()][-1:]
        raise RuntimeError(f"peer {self.name} ended: {last[0] if last else 'it said nothing'}")


class _Transformers:
    def __init__(self, gguf: str, dtype: str) -> None:
        import torch
        import transformers

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self.version = f"{transformers.__version__}, torch {torch.__version__}"
        path = Path(gguf)
        model: Any = transformers.AutoModelForCausalLM
        self._torch = torch
        self._model = model.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=getattr(torch, dtype)
        ).eval()

    def prefill(self, tokens: list[int]) -> Any:
        """The cache after a prompt."""
        with self._torch.inference_mode():
            ids = self._torch.tensor([tokens])
            return self._model(ids, use_cache=True, logits_to_keep=1)

    def decode(self, context: list[int], steps: int) -> float:
        """Seconds of `steps` greedy tokens behind a context."""
        out = self.prefill(context)
        with self._torch.inference_mode():
            begin = time.perf_counter()
            for _ in range(steps):
                token = out.logits[:, -1:].argmax(-1)
                out = self._model(token, past_key_values=out.past_key_values, use_cache=True)
            return time.perf_counter() - begin


class _LlamaCpp:
    def __init__(self, gguf: str) -> None:
        import llama_cpp

        self.version = llama_cpp.__version__
        wide = Path(gguf).with_suffix(".f32.gguf")
        if not wide.exists():
            how = llama_cpp.llama_model_quantize_default_params()
            how.ftype, how.allow_requantize = 0, True  # float32, from whatever the file holds
            if llama_cpp.llama_model_quantize(gguf.encode(), str(wide).encode(), how):
                raise SystemExit(f"{gguf}: llama.cpp could not write it as float32")
        threads = len(os.sched_getaffinity(0))
        self._model = llama_cpp.Llama(
            str(wide),
            n_ctx=CONTEXT,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
            type_k=0,
            type_v=0,
        )

    def prefill(self, tokens: list[int]) -> None:
        """Evaluates a prompt on an empty cache."""
        self._model.reset()
        self._model.eval(tokens)

    def decode(self, context: list[int], steps: int) -> float:
        """Seconds of `steps` tokens behind a context."""
        self.prefill(context)
        begin = time.perf_counter()
        for _ in range(steps):
            self._model.eval([context[0]])
        return time.perf_counter() - begin


def main(name: str, gguf: str) -> None:
    """Serves requests until an empty one."""
    kind, _, dtype = name.partition("-")
    peer: Any = _LlamaCpp(gguf) if kind == "llama.cpp" else _Transformers(gguf, dtype)

    def answer(**values: Any) -> None:
        print(json.dumps(values), flush=True)

    answer(version=peer.version)
    for line in sys.stdin:
        request = json.loads(line)
        if not request:
            answer(peak_bytes=peak_bytes())
            return
        tokens = [(7 * i) % 40_000 + 100 for i in range(request.get("prefill", request.get("context", 0)))]
        if "decode" in request:
            answer(seconds=peer.decode(tokens, request["decode"]))
        else:
            begin = time.perf_counter()
            peer.prefill(tokens)
            answer(seconds=time.perf_counter() - begin)


if __name__ == "__main__":
    main(*sys.argv[1:])
