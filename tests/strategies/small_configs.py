"""Small configurations of transformers, of any kind, for tests in float64."""

SIZES = {
    "vocab_size": 96,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What all of them have; a test adds widths."""


def config_of(kind, **sizes):
    import transformers

    return transformers.CONFIG_MAPPING[kind](**SIZES | sizes)
