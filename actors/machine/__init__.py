"""The machine of an actor and its process: devices, memory, files, identity."""
