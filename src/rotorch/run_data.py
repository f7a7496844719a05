"""Sections of a run file on text: `[data]`, and the tables of further texts. `run_config.py` reads them. No torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, StringConstraints

Word = Annotated[str, StringConstraints(min_length=1)]
Words = Annotated[tuple[Word, ...], Field(strict=False, min_length=1)]
"""TOML has lists and no tuples, hence `strict=False`; their elements are held to their type all the same."""

MOST_AT_ONCE = 10**9  # samples, passes, tokens

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
HELD_OUT = "held-out"
"""The name of the text that a run holds out of its own."""


class Section(BaseModel):
    """A table of a run file: values have their own types, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


class NamedText(Section):
    """A text with a name: of `[[data.sources]]` and `[[train.eval]]`."""

    name: Name
    source: Word
    text_field: Word | None = None
    suffixes: Words | None = None

    def _in_place_of(self, data: DataSection) -> DataSection:
        changes = {"source": self.source, "text_field": self.text_field or data.text_field, "suffixes": self.suffixes}
        return data.model_copy(update={**changes, "sources": ()})


class DataSource(NamedText):
    """[[data.sources]]: one of several texts that a run is trained on.

    Attributes:
        name: letters, digits, `_` and `-`; its held-out text is measured as `eval_NAME_loss`.
        source: like `data.source`; of the run's `data.kind`.
        weight: the source's share of samples is this over the sum of weights; at least a thousandth.
        text_field: the field of records that holds the text; that of `[data]` by default.
        suffixes: suffixes of files to read in a directory; by default all files that look like text.
    """

    weight: Annotated[PositiveFloat, Field(le=1e6)] = 1.0

    def as_data(self, data: DataSection) -> DataSection:
        """`data` of the run, with this text in place of all of them."""
        return self._in_place_of(data)


class DataSection(Section):
    """[data]: the text.

    Attributes:
        kind: "text"; "instructions": JSONL or Parquet records of prompts and responses, of which only responses are
            learnt; or "preferences": such records of a prompt with a chosen and a rejected response, see `[dpo]`.
        source: a text, JSONL or Parquet file, a directory of them, "stdlib" (the running interpreter's own sources), or
            `hf://datasets/owner/name` of the Hugging Face hub.
        text_field: the field of JSONL and Parquet records that holds the text.
        prompt_field: the field of a record of instructions or preferences that holds the prompt.
        response_field: the field that holds the response.
        chosen_field: the field of a record of preferences that holds the chosen response.
        rejected_field: the field that holds the rejected response.
        pack: several records of instructions may share a sample; else the rest of a sample is padding. Left out: they
            do if the model keeps them apart.
        documents: "apart": attention stays inside a document, and positions begin again with each; "joined": tokens see
            all that is before them in the sample. Left out: text is joined, instructions are apart.
        suffixes: suffixes of files to read in a directory; by default all files that look like text.
        tokenizer: "bytes", a `tokenizer.json`, the directory of one, a GGUF file, or "model": that of `model.init`.
        eos_token: the token that ends a document, if the tokenizer's files do not name it.
        sequence_length: tokens per sample.
        held_out_fraction: share of the text that is never trained on and measures the model.
        cache_dir: directory of tokenised text; by default `~/.cache/rotorch`.
        stream: read, tokenise and pack records of JSONL and Parquet as they are needed, with no tokenised text on disk;
            nothing is held out then.
        shuffle_buffer: samples of a stream that are shuffled together, twice as many are in memory; with 1 they come as
            they lie in the files.
        sources: several texts in place of `source`, mixed by weights, see `[[data.sources]]`.
    """

    kind: Literal["text", "instructions", "preferences"] = "text"
    source: Word = "stdlib"
    text_field: Word = "text"
    prompt_field: Word = "prompt"
    response_field: Word = "response"
    chosen_field: Word = "chosen"
    rejected_field: Word = "rejected"
    pack: bool | None = None
    documents: Literal["joined", "apart"] | None = None
    suffixes: Words | None = None
    tokenizer: Word = "bytes"
    eos_token: Word | None = None
    sequence_length: Annotated[PositiveInt, Field(le=MOST_AT_ONCE)] = 256
    held_out_fraction: Annotated[float, Field(ge=0.0, le=0.5)] = 0.02
    cache_dir: Word | None = None
    stream: bool = False
    shuffle_buffer: Annotated[PositiveInt, Field(le=MOST_AT_ONCE)] = 1000
    sources: Annotated[tuple[DataSource, ...], Field(strict=False)] = ()


class EvalText(NamedText):
    """[[train.eval]]: a text to measure the model on, all of it, beside the held-out text.

    Attributes:
        name: letters, digits, `_` and `-`; metrics have it as `eval_NAME_loss` and `eval_NAME_bits_per_byte`.
        source: like `data.source`; of the run's `data.kind`.
        text_field: the field of records that holds the text; that of the run's data by default.
        suffixes: suffixes of files to read in a directory; by default all files that look like text.
    """

    def as_data(self, data: DataSection) -> DataSection:
        """`data` of the run, with this text in place of its own and nothing held out."""
        return self._in_place_of(data).model_copy(
            update={"held_out_fraction": 0.0, "stream": False, "shuffle_buffer": 1000}
        )


class DpoSection(Section):
    """[dpo]: direct preference optimisation (arXiv 2305.18290), the loss of data.kind = "preferences".

    Attributes:
        beta: strength of the tie to the reference, which is the model as the run began with it.
    """

    beta: Annotated[PositiveFloat, Field(le=1e3)] = 0.1
