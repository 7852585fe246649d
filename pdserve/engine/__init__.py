"""One step: plan, run, sample."""
