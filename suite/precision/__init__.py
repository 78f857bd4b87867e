"""Axis 3: in what numbers do the matrix products run? One value a file."""
