"""Kernel generators by family. A kernel is a frozen description that can emit itself; equal ones are emitted once."""
