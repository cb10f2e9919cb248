"""What actors hold in memory: weights, gradients, states, activations, caches, snapshots, checkpoints."""
