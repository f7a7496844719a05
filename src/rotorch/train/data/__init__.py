"""From text on disk to batches: corpus, tokens, windows, order."""
