"""Who leaves RAM: pure classes without clock, I/O or randomness."""
