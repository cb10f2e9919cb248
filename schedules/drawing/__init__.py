"""A schedule or a timeline as text, SVG, Chrome trace or CSV."""
