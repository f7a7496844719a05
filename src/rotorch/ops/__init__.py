"""Products with weights that are cut over ranks: visiting slices, own shards, blocks.

Modules, linear layers, embeddings, convolutions, and the loss, each as one autograd function.
"""
