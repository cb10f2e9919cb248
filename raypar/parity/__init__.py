"""The parity check: compare a layout with one plain process, and find where a difference begins."""
