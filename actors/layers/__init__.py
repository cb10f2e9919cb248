"""Layers that the built-in models are made of: linear, attention, positions, dropout."""

from raypar.actors.layers import masks as masks
