"""A loop for Accelerate: accumulation, clipping, a schedule, evaluation, checkpoints."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from adapter_loops import Run, model, rows, weights_of
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

import rotorch.accelerate


def loop(layout: str | None, directory: Path, *, resume: bool = False) -> Run:
    """Six steps of two micro-batches each; the state is saved after three, and a resumed run begins there."""
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, dataloader_config=DataLoaderConfiguration(split_batches=True)
    )
    net = model(seed=9 if resume else 0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - 0.1 * step)
    loader = DataLoader(rows(96, seed=1), batch_size=8)
    if layout is None:
        net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    else:
        net, optimizer, loader = rotorch.accelerate.prepare(accelerator, net, optimizer, loader, layout=layout)
    schedule, held_out = accelerator.prepare(schedule, DataLoader(rows(11, seed=2), batch_size=4))
    run = Run()
    begin = 0
    if resume:
        accelerator.load_state(str(directory / "state"))
        begin = 3
        loader = accelerator.skip_first_batches(loader, 2 * begin)
    steps = begin
    for batch in loader:
        with accelerator.accumulate(net):
            loss = net(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                run.see("norm", accelerator.clip_grad_norm_(net.parameters(), 0.5))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        run.see("loss", accelerator.reduce(loss.detach(), "mean"))
        run.see("rows", accelerator.reduce(torch.tensor(len(batch["input_ids"])), "sum"))
        if accelerator.sync_gradients:
            run.see("rate", schedule.get_last_lr()[0])
            steps += 1
            if steps == 3 and not resume:
                accelerator.save_state(str(directory / "state"))
    evaluate(accelerator, net, held_out, run)
    accelerator.save_model(net, str(directory / "model"))
    whole = accelerator.get_state_dict(net)
    assert bool(whole) is accelerator.is_main_process
    unwrapped = accelerator.unwrap_model(net)
    assert isinstance(unwrapped, LlamaForCausalLM)
    run.weights = weights_of(unwrapped)
    if layout is not None:
        net.parallel.close()
    return run


def evaluate(accelerator: Accelerator, net: Any, held_out: Any, run: Run) -> None:
    net.eval()
    logits, names = [], []
    for batch in held_out:
        with torch.no_grad():
            found = net(**batch).logits
        logits.append(accelerator.gather_for_metrics(found))
        names += accelerator.gather_for_metrics([str(row) for row in batch["input_ids"][:, 0].tolist()])
    gathered = torch.cat(logits)
    run.see("rows", len(gathered))
    run.see("first", gathered[0].abs().mean())
    run.see("last", gathered[-1].abs().mean())
    run.see("all", gathered.abs().mean())
    run.see("names", len(names))
    run.see("sum of names", sum(int(name) for name in names))


def shares(layout: str) -> tuple[int, list[float], int]:
    """Steps that a schedule counts, the first ids of rows that a rank reads, and how many rows are gathered."""
    accelerator, net = Accelerator(cpu=True), model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    loader = DataLoader(rows(8, seed=1), batch_size=2)
    net, optimizer, schedule, loader = rotorch.accelerate.prepare(
        accelerator, net, optimizer, schedule, loader, layout=layout
    )
    read, gathered = [], 0
    for batch in loader:
        accelerator.backward(net(**batch).loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        read += batch["input_ids"][:, 0].tolist()
        gathered += len(accelerator.gather(batch["input_ids"]))
    net.parallel.close()
    return schedule.scheduler.last_epoch, read, gathered
