"""How actors died: their processes, monitors on every node, Ray's errors and logs."""
