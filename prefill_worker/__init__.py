"""The prefill pool."""
