"""The front of the cluster."""
