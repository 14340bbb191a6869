"""What a process records about itself, traces and statistics, and its evaluation. Every part may import it."""
