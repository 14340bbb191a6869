"""Memory of clients in the driver: its quota, its private copies, and the buffers that the driver manages."""
