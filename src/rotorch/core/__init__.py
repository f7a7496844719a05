"""Pure descriptions: what a model consists of, what a strategy does to it, and the errors users see. No torch."""
