"""Units of a model, from its tensor-parallel plan: that of a Hugging Face model, or one handed in."""
