"""Pure descriptions: the parts of a model, a strategy's layouts of them, and the errors that users see. No torch."""
