"""Products with weights that go round: modules, linear layers, embeddings, and the loss, each as one autograd function."""
