"""What each rank holds of a model: weights at rest and during a pass, for every strategy."""
