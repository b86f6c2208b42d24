"""The pair-directions of the study, each with its family.

A family is one way in which two models can differ; directions of one family are not independent.
"""

DIRECTIONS: tuple[tuple[str, str, str], ...] = (
    ("tiny-4l", "tiny-6l", "other seed"),
    ("tiny-6l", "tiny-4l", "other seed"),
    ("tiny-untrained", "tiny-6l", "untrained"),
    ("tiny-untrained", "tiny-4l", "untrained"),
    ("tiny-6l", "tiny-twin", "permuted"),
    ("tiny-broken", "tiny-6l", "permuted"),
    ("tiny-6l", "tiny-broken", "permuted"),
    ("tiny-noised", "tiny-6l", "noised"),
    ("tiny-4l", "tiny-noised", "noised"),
    ("tiny-6l", "tiny-untrained", "untrained"),
    ("tiny-noised-more", "tiny-6l", "noised"),
    ("tiny-noised-most", "tiny-6l", "noised"),
    ("24l", "smollm2-135m", "healed"),
    ("smollm2-135m", "24l", "healed"),
    ("telegram", "smollm2-135m", "fine-tuned"),
    ("20l", "smollm2-135m", "shortened"),
    ("untrained", "smollm2-135m", "untrained"),
    ("noised", "smollm2-135m", "noised"),
    ("17l", "smollm2-135m", "shortened"),
    ("tiny-6l", "smollm2-135m", "other tokenizer"),
    ("noised-less", "smollm2-135m", "noised"),
    ("smollm2-135m", "telegram", "fine-tuned"),
    ("24l-unhealed", "smollm2-135m", "shortened"),
)
"""Source, target, family."""
