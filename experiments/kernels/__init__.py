"""The kernel benchmark: correct first, then how fast, and against what."""
