"""Language models: their weights, attention, adapters, and how they run packed rows."""
