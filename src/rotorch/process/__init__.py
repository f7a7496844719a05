"""Processes and their threads: forking, new interpreters, host memory, gloo's threads, death of the parent."""
