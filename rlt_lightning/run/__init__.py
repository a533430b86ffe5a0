"""What a run leaves on disk (rows, figures, digests), what it prints, and how its processes end together."""

__version__ = "0.1.0"  # of this package; output files record it
