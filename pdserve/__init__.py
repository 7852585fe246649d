"""What every process shares: requests, cache, kernels, models, engine, wire and registry."""
