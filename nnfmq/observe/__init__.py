"""What a driver tells about itself: its statistics area, how workers write it, and how others read it."""
