"""Tiles: linear layers that are computed in pieces."""
