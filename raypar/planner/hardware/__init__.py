"""What devices, links and clusters can do, by their data sheets."""
