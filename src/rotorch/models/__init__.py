"""From a model to its units: reading tensor-parallel plans, of Hugging Face models or handed in."""
