"""The search for a layout: what fits a cluster's memory, ranked by the time of a step."""
