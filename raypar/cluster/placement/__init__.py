"""Placement of actors on nodes: devices, resources, and whether there is room for them."""
