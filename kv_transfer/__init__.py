"""Moves KV blocks between pools: protocol, plan, links."""
