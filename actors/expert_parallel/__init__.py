"""Experts: routers, their losses, capacity, and how tokens go to experts and come back."""
