"""Where Ray is talked to: connecting, placing actors, calling them."""
