"""What is wrong with the nodes, the network and the Ray that a run would use, each with advice."""
