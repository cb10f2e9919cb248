"""How many parameters there are, of which tensors, and on which actor."""
