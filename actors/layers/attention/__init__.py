"""Attention: the layer, its kernels, other kinds of attention, the KV cache, and slices of a sequence."""
