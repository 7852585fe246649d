"""Membership under leases."""
