"""Models in folders of Hugging Face: names of tensors, files, and slices that are read. Only weights.py has torch."""
