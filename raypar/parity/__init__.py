"""Whether a layout computes what one plain process does, and if not, where that begins."""
