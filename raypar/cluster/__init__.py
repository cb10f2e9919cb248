"""The connection to Ray: joining a cluster, placing actors, and calling them."""
