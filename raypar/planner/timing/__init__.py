"""How long a training step takes on a cluster on paper, from data sheets and the sizes of a run."""
