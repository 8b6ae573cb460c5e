"""Layouts of sets: each module reads one, and says by which files it knows it. `sets.py` holds the list."""
