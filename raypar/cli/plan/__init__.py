"""`raypar plan`."""
