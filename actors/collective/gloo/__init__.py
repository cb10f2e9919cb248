"""Groups over TCP with torch's Gloo, on one node and over several."""
