"""Model families, as lists of layers with logical names."""
