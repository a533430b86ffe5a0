"""How the module gets a step's completions, and which rank computes which of them."""
