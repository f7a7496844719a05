"""Memory of passes, counted while they run: on real tensors, or on fake ones before anything is started."""
