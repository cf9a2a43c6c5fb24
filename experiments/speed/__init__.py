"""How fast a model is served, next to the machine's limits and to peers."""
