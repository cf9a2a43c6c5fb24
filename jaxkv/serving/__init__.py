"""Continuous batching for experiments: `Engine.submit`, `step`, `run`, `cancel`. See docs/serving.md."""
