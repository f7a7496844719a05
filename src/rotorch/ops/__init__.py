"""Products with weights that go round.

Modules, linear layers, embeddings, and the loss, each as one autograd function.
"""
