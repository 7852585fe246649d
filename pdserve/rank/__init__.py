"""A rank process: one thread owns the device and the schedulers, others only move bytes."""
