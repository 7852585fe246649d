"""Command line and local pools."""
