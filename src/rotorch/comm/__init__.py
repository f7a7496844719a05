"""The only package that calls torch.distributed operations: collectives, the ring, and the meter that counts both."""
