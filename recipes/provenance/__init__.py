"""Where a published bundle comes from, and whether it still is what was published."""
