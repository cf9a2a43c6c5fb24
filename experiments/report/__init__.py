"""The report of a run: summary, one-sentence answer, plots, HTML page and terminal table."""
