"""What a run leaves on disk: rows, results, cards, and the folder that holds them."""
