"""Drawings of a schedule or a timeline: text, SVG, Chrome trace and overlay, and the files they are saved to."""
