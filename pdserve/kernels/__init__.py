"""Attention and friends; `reference` is plain torch, the oracle and the CPU path."""
