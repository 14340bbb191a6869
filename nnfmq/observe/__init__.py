"""What processes record about themselves: traces and statistics, and their evaluation. Every part may import it."""
