"""A pipeline stage on another node than its face: what starts its ranks there."""
