"""Groups of actors on GPUs: over torch's NCCL, cupy's NCCL, or through the host."""
