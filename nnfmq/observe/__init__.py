"""What a process records about itself while it runs, and its evaluation. Every part of the package may import it."""
