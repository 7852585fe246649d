"""What chooses workers: in a front's own process, or in one that several fronts share."""
