"""The devices of all drivers, as one runtime sees them: discovery, names, reconnection, and the CPU device."""
