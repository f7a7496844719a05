"""Loops for Fabric and Lightning's Trainer: accumulation, clipping, evaluation, checkpoints."""

import logging
from pathlib import Path
from typing import Any

import torch
from adapter_loops import Run, model, rows, rows_each, weights_of
from lightning import Fabric, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler

import rotorch.lightning


def fabric_loop(layout: str | None, directory: Path, *, resume: bool = False) -> Run:
    """Six steps of two micro-batches each; the state is saved after three, and a resumed run begins there."""
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    if layout is None:
        fabric = Fabric(accelerator="cpu", devices=1)
    else:
        fabric = Fabric(accelerator="cpu", devices=2, strategy=rotorch.lightning.FabricStrategy(layout))
    fabric.launch()
    net = model(seed=9 if resume else 0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)
    net, optimizer = fabric.setup(net, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(rows(96, seed=1), batch_size=rows_each(layout, 8)))
    run, state = Run(), {"model": net, "optimizer": optimizer, "done": 0}
    if resume:
        assert fabric.load(directory / "state", state) == {"note": "beside"}
    for number, batch in enumerate(loader):
        if number < 2 * state["done"]:
            continue
        last = number % 2 == 1
        with fabric.no_backward_sync(net, enabled=not last):
            loss = net(**batch).loss
            fabric.backward(loss / 2)
        run.see("loss", fabric.all_reduce(loss.detach(), reduce_op="mean"))
        if not last:
            continue
        run.see("norm", fabric.clip_gradients(net, optimizer, max_norm=0.5))
        optimizer.step()
        optimizer.zero_grad()
        state["done"] += 1
        if state["done"] == 3 and not resume:
            fabric.save(directory / "state", {**state, "note": "beside"})
    run.see("done", state["done"])
    run.see("rows", fabric.all_reduce(torch.tensor(len(batch["input_ids"])), reduce_op="sum"))
    run.see("gathered", fabric.all_gather(batch["input_ids"]).numel())
    run.see("largest", fabric.all_reduce(batch["input_ids"].max(), reduce_op="max"))
    plain = net.module
    run.weights = weights_of(plain)
    if layout is not None:
        plain.parallel.close()
    return run


class Training(LightningModule):
    """A module as people write them: a model, and what to do with it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = model(seed=seed)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Any, number: int) -> Any:
        loss = self.net(**batch).loss
        self.steps += 1
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("val_loss", self.net(**batch).loss, sync_dist=True)
        self.log("val_rows", float(len(batch["input_ids"])), sync_dist=True, reduce_fx="sum")

    def test_step(self, batch: Any, number: int) -> None:
        self.log("test_loss", self.net(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - 0.1 * step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Watch(Callback):
    """Sees each step's loss and rate, and each validation's numbers."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
        self.run.see("loss", trainer.callback_metrics["train_loss"])
        self.run.see("rate", trainer.optimizers[0].param_groups[0]["lr"])

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.run.see("validation", trainer.callback_metrics["val_loss"])
        self.run.see("rows", trainer.callback_metrics["val_rows"])


def trainer_loop(layout: str | None, directory: Path, *, resume: bool = False) -> Run:
    """Two epochs of three steps of two micro-batches each, a checkpoint after each; then the best one is tested."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    run = Run()
    keep = ModelCheckpoint(directory / "kept", monitor="val_loss", save_top_k=-1, filename="{epoch}")
    newest = ModelCheckpoint(directory / "newest", filename="{epoch}")
    ranks: dict[str, Any] = {"devices": 1}
    if layout is not None:
        ranks = {"devices": 2, "strategy": rotorch.lightning.Strategy(layout)}
    trainer = Trainer(
        accelerator="cpu", max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5, logger=False,
        callbacks=[keep, newest, Watch(run)], enable_progress_bar=False, log_every_n_steps=1,
        default_root_dir=directory, **ranks,
    )  # fmt: skip
    training = Training(seed=9 if resume else 0)
    loaders = [DataLoader(rows(n, seed=n), batch_size=rows_each(layout, 8)) for n in (48, 24, 16)]
    if layout is None:  # Trainer reads in this order where there are ranks
        order = DistributedSampler(rows(48, seed=48), num_replicas=1, rank=0)
        loaders[0] = DataLoader(rows(48, seed=48), batch_size=8, sampler=order)
    began = str(directory / "kept" / "epoch=0.ckpt") if resume else None
    trainer.fit(training, loaders[0], loaders[1], ckpt_path=began)
    run.see("steps", training.steps)
    trainer.strategy.barrier()  # rank 0 removes older ones
    run.see("kept", len(list((directory / "newest").iterdir())))
    run.weights = weights_of(training.net)
    (tested,) = trainer.test(training, loaders[2], ckpt_path=str(directory / "kept" / "epoch=1.ckpt"), verbose=False)
    run.see("tested", tested["test_loss"])
    (tested,) = trainer.test(training, loaders[2], ckpt_path=str(directory / "kept" / "epoch=0.ckpt"), verbose=False)
    run.see("tested at first", tested["test_loss"])
    run.see("steps", training.steps)
    if layout is not None:
        training.net.parallel.close()
    return run
