"""A function in a process of its own, which may be killed at any moment."""

import multiprocessing
import os

import torch

from rotorch.process.forking import forking


def result_of(work, *arguments):
    """Result of `work(*arguments)` in a forked process; None if that was killed before."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, work, arguments))
    with forking():
        process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return None
    finally:
        process.join()
        receiver.close()


def _send(pipe, work, arguments):
    torch.set_num_threads(1)
    pipe.send(work(*arguments))
    pipe.close()
    os._exit(0)
