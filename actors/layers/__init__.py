"""Layers whose work is divided over the actors of a group."""
