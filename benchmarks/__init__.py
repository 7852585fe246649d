"""Measurements: one script per question, one JSON file per script in `results/`."""
