"""Benchmarks of single GPU kernels against their own floors."""
