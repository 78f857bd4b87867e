"""Axis 2: where does each tensor lie, and where do ranks meet? One value a file; none changes the function."""
