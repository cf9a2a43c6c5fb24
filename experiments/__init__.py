"""Experiments: workloads, runner, report. `python -m experiments.launch --config=configs/x.py`."""
