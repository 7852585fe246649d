"""Frozen settings with their checks."""
