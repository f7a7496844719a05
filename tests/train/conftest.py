import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = "Once upon a time there was a ring.\n\nIt went round, slice by slice; naïve café ☕ words.\n" * 5


@pytest.fixture(scope="session")
def byte_level_bpe_text():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer.to_str()


@pytest.fixture
def byte_level_bpe(byte_level_bpe_text):
    """A GPT-2-like tokenizer of 300 tokens; id 0 is <|endoftext|>. Each test may change its own."""
    return Tokenizer.from_str(byte_level_bpe_text)


@pytest.fixture
def tokenizer_json(byte_level_bpe, tmp_path):
    path = tmp_path / "tokenizer" / "tokenizer.json"
    path.parent.mkdir()
    byte_level_bpe.save(str(path))
    return path


@pytest.fixture
def english():
    return TEXT
