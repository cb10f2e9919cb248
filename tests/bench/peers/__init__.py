"""The peers: plain uses of their public APIs, as their documentation has them."""
