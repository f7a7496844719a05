"""Path of text from disk to batches: corpus, tokens, windows, order."""
